"""`python -m mlaforge_generator.cli`."""

from . import main

main()
