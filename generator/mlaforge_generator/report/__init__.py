"""A page about one spec: the plan as pictures, what the compiler made of it, verification, a timeline and benches.

The page is one HTML file that fetches nothing. `page` fills the template, `pictures` and `plots` draw, `results` reads
the JSON of benches. All that comes from outside (names, versions, messages, results) is text to them: the template
escapes it, and pictures are made as trees, not as strings.
"""

from .page import Checked, Compiled, Verification, report_page
from .pipeline import Edge
from .results import ResultsError, read_results

__all__ = ["Checked", "Compiled", "Edge", "ResultsError", "Verification", "read_results", "report_page"]
