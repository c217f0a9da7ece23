"""What torch does with the operators, under the simulator: opcheck, torch.compile, torch.export. All of them alike."""

from __future__ import annotations

import functools
import io
from pathlib import Path

import pytest
import torch

import mlaforge
from mlaforge.api import MLA
from operators import NAMES, Call, Layer, calls, equal
from test_verify import one_thread as one_thread

pytestmark = pytest.mark.usefixtures("one_thread")
GENERATED = Path(__file__).parents[1] / "generated"


@functools.cache
def simulated() -> MLA:
    return mlaforge.load(GENERATED / "deepseek_v3", device="sim")


@functools.cache
def call(name: str) -> Call:
    return calls(simulated(), "cpu")[name]


def test_every_operator_is_here() -> None:
    """But FlashMLA's, which has tests of its own."""
    names = {name.partition("::")[2] for name in torch._C._dispatch_get_all_op_names() if name.startswith("mlaforge::")}
    out = {f"{name}_out" for name in NAMES if name != "append"}
    assert names - {"flash_mla"} == {*NAMES, *out}


# Those of the memory-bound kernels and of chunked prefill are checked beside their other tests.
@pytest.mark.parametrize("name", ["decode", "prefill"])
def test_opcheck(name: str) -> None:
    made = call(name)
    torch.library.opcheck(made.operator, made.arguments)
    torch.library.opcheck(getattr(torch.ops.mlaforge, f"{name}_out"), made.out_arguments())


FORMS = [*NAMES, *(f"{name}_out" for name in NAMES if name != "append")]


@pytest.mark.parametrize("name", FORMS)
def test_what_is_missing_or_elsewhere_is_named(name: str) -> None:
    """A tensor without storage is sent to the operator's fake implementation, which writes to nothing."""
    made = call(name.removesuffix("_out"))
    operator = getattr(torch.ops.mlaforge, name)
    arguments = made.out_arguments() if name.endswith("_out") else made.arguments
    for i, argument in enumerate(operator.default._schema.arguments):
        if not isinstance(arguments[i], torch.Tensor):
            continue
        changes = [arguments[i].to("meta")]
        if argument.type.kind() == "TensorType":
            changes.append(None)
        for change in changes:
            with pytest.raises(ValueError, match=rf"\b{argument.name} is (None; it must be|on (meta|cpu))"):
                operator(*arguments[:i], change, *arguments[i + 1 :])


@pytest.mark.parametrize("name", [name for name in FORMS if name != "append"])
def test_fake_results_have_the_right_device(name: str) -> None:
    made = call(name.removesuffix("_out"))
    arguments = made.out_arguments() if name.endswith("_out") else made.arguments
    meta = [each.to("meta") if isinstance(each, torch.Tensor) else each for each in arguments]
    results = getattr(torch.ops.mlaforge, name)(*meta)
    assert all(each.is_meta for each in ((results,) if isinstance(results, torch.Tensor) else results or ()))


@pytest.mark.parametrize("name", ["decode", "prefill", "chunked_prefill", "gather", "merge"])
def test_results_whose_rows_overlap_are_refused(name: str) -> None:
    made = call(name)
    first, arguments = made.into[0], list(made.out_arguments())
    arguments[next(i for i, each in enumerate(arguments) if each is first)] = first[:1].expand(first.shape)
    with pytest.raises(ValueError, match=r"out has shape .*: its rows overlap"):
        getattr(torch.ops.mlaforge, f"{name}_out")(*arguments)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "append"])
def test_both_forms_agree(name: str) -> None:
    made = call(name)
    results = made.operator(*made.arguments)
    getattr(torch.ops.mlaforge, f"{name}_out")(*made.out_arguments())
    assert equal(made.into, results if isinstance(results, tuple) else (results,))


@pytest.mark.parametrize("name", NAMES)
def test_compile(name: str) -> None:
    """In one graph; where sizes may vary, without another trace for another size."""
    made = call(name)
    torch._dynamo.reset()
    compiled = torch.compile(made.layer, fullgraph=True, backend="aot_eager", dynamic=True)
    assert equal(compiled(*made.copies()), made.layer(*made.copies()))
    with torch.compiler.set_stance("fail_on_recompile"):
        assert equal(compiled(*made.copies(True)), made.layer(*made.copies(True)))


@pytest.mark.parametrize("name", NAMES)
def test_export(name: str) -> None:
    """The program holds the operator, comes back from a file, and runs with other sizes where they were left open."""
    made = call(name)
    shapes: list[dict[int, object]] = [{} for _ in made.tensors]
    for tensor, dim in made.varies:
        shapes[tensor][dim] = torch.export.Dim.DYNAMIC
    program = torch.export.export(Layer(made), made.copies(), dynamic_shapes={"tensors": tuple(shapes)})
    targets = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert any(target.startswith(f"mlaforge.{name}.") for target in targets), targets
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    exported = torch.export.load(file).module()
    for smaller in (False, True) if made.varies else (False,):
        assert equal(exported(*made.copies(smaller)), made.layer(*made.copies(smaller)))
