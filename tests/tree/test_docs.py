"""The documentation says what is so: its examples run, its tables are the code's, its links lead somewhere."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import pytest
import torch
from kvcmas_sgl.radix_ext import cache as cache_module
from kvcmas_sgl.radix_ext.decision import Reason
from kvcmas_sgl.radix_ext.estimators import Edge, Observation
from kvcmas_sgl.triton_kernels import RotaryTable, Segment, plan, rotate, run
from kvcmas_sgl.triton_kernels.self_check import disagreement
from prometheus_client import CollectorRegistry

from kvcmas_sgl import metrics
from kvcmas_sgl.switches import Mode
from tests.tree.harness import CRITIC, PLANNER, Tree, document, learned

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
LAYERS, HEADS, DIM = 3, 2, 8
WIDTH = HEADS * DIM
EDGE = Edge("tenant", "planner", "critic")


def rows(page: str, heading: str) -> list[list[str]]:
    """Cells of the table whose first heading is ``heading``."""
    lines = (DOCS / page).read_text().splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith(f"| {heading} |")) + 2
    found = []
    while at < len(lines) and lines[at].startswith("|"):
        found.append([cell.strip() for cell in re.split(r"(?<!\\)\|", lines[at])[1:-1]])
        at += 1
    return found


@pytest.fixture(scope="module")
def examples() -> dict[str, ModuleType]:
    """The code blocks of extending.md, by the file that each names in its first line."""
    found = {}
    for block in re.findall(r"```python\n(.*?)```", (DOCS / "extending.md").read_text(), flags=re.DOTALL):
        name = block.splitlines()[0].removeprefix("# ")
        module = ModuleType(Path(name).stem)
        # Dataclasses look their module up.
        sys.modules[module.__name__] = module
        exec(compile(block, name, "exec"), module.__dict__)
        found[name] = module
    return found


@pytest.fixture
def shift(examples: dict[str, ModuleType]) -> Any:
    return examples["radix_ext/estimators/shift.py"].ShiftEstimator(LAYERS, HEADS, DIM)


def draw(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def observe(estimator: Any, edge: Edge, by: torch.Tensor, tokens: int = 20) -> None:
    """A span whose delta is ``by`` [L, 2D] at every token, in two chunks of layers."""
    base, delta = draw(1, 2, LAYERS, tokens, WIDTH), by[:, None].expand(-1, tokens, -1)
    for layers in (slice(0, 2), slice(2, LAYERS)):
        k, v = delta[layers].split(WIDTH, dim=-1)
        estimator.observe(edge, Observation(layers.start, torch.arange(tokens), base[0, layers], base[1, layers], k, v))
    estimator.finish(edge)


def test_the_example_estimator_finds_a_shift_and_the_correction_op_applies_it(shift: Any) -> None:
    by = draw(0, LAYERS, 2 * WIDTH)
    observe(shift, EDGE, by - 1, tokens=10)
    first = shift.predict(EDGE)
    observe(shift, EDGE, by + 0.5, tokens=20)
    # Ten tokens pull one way and twenty half as far the other way: the mean is the shift.
    table = RotaryTable.from_theta(1e4, DIM, 64)
    k, v = (list(part) for part in draw(2, 2, LAYERS, 12, HEADS, DIM))
    source, target = torch.arange(5), torch.arange(6, 11)
    before_k, before_v = [part.clone() for part in k], [part.clone() for part in v]
    segment = Segment(source, target, source_start=3, target_start=30, delta=shift.predict(EDGE))
    run(plan([segment], table, head_dim=DIM, kv_heads=HEADS, backend="torch"), k, v)
    for layer in range(1, LAYERS):
        dk, dv = by[layer].split(WIDTH)
        canonical = rotate(before_k[layer][source], source + 3, table, inverse=True) + dk.view(HEADS, DIM)
        torch.testing.assert_close(k[layer][target], rotate(canonical, target + 24, table))
        torch.testing.assert_close(v[layer][target], before_v[layer][source] + dv.view(HEADS, DIM))
    # What was handed out before has not changed.
    torch.testing.assert_close(first.bias[:, 0], by - 1)


def test_the_example_estimator_accounts_for_its_bytes_and_forgets(shift: Any) -> None:
    other, stranger = Edge("tenant", "planner", "judge"), Edge("elsewhere", "planner", "critic")
    assert (shift.predict(EDGE), shift.spans_seen(EDGE), shift.state_bytes) == (None, 0, 0)
    for edge in (EDGE, other, stranger):
        observe(shift, edge, draw(3, LAYERS, 2 * WIDTH))
    # fp32: the sums and counts, and the delta's project, shift, weight and bias.
    numbers = LAYERS * (2 * WIDTH + 1) + LAYERS * (2 * WIDTH + 1 + 2 * WIDTH + 2 * WIDTH)
    assert shift.edge_bytes(EDGE) == 4 * numbers and shift.state_bytes == 3 * 4 * numbers
    shift.drop(other)
    shift.drop_namespace("elsewhere")
    assert shift.edges() == (EDGE,) and shift.state_bytes == 4 * numbers
    bad = torch.full((1, 4, WIDTH), float("nan"))
    with pytest.raises(ValueError):
        shift.observe(EDGE, Observation(0, torch.arange(4), bad, bad, bad, bad))
    assert shift.spans_seen(EDGE) == 1 and shift.predict(EDGE) is not None


def test_the_example_estimator_outlives_its_process(examples: dict[str, ModuleType], shift: Any) -> None:
    observe(shift, EDGE, draw(4, LAYERS, 2 * WIDTH))
    state, before = shift.state(), shift.predict(EDGE)
    observe(shift, EDGE, draw(5, LAYERS, 2 * WIDTH))
    restored = examples["radix_ext/estimators/shift.py"].ShiftEstimator(LAYERS, HEADS, DIM)
    restored.load(state)
    assert torch.equal(restored.predict(EDGE).bias, before.bias) and restored.spans_seen(EDGE) == 1
    observe(restored, EDGE, draw(5, LAYERS, 2 * WIDTH))
    assert torch.equal(restored.predict(EDGE).bias, shift.predict(EDGE).bias)


def test_the_example_estimator_serves_in_the_cache(
    examples: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = examples["radix_ext/estimators/shift.py"].ShiftEstimator

    def make(name: str, *, rank: int, tau: float | None, **shape: int) -> Any:
        return made(**shape)

    monkeypatch.setattr(cache_module, "make_estimator", make)
    tree = Tree()
    learned(tree)
    PLANNER.read(tree, document(9))
    assert CRITIC.read(tree, document(9))["reason"] == "reused"
    assert isinstance(tree.cache.estimators["affine"], made)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_example_backend_agrees_with_the_reference(examples: dict[str, ModuleType], dtype: torch.dtype) -> None:
    backend = examples["triton_kernels/plain_backend.py"]
    assert backend.unavailable(torch.device("cpu"), dtype) is None
    assert "CPU only" in backend.unavailable(torch.device("cuda"), dtype)
    assert disagreement(backend, torch.device("cpu"), dtype, 3, 16) is None


@pytest.fixture(scope="module")
def exported() -> dict[str, tuple[str, str]]:
    """Type and label of every metric by its name in Prometheus."""
    registry = CollectorRegistry()
    metrics.export(Tree().cache, registry)
    found = {}
    for metric in registry._collector_to_names:
        (family,) = metric.describe()
        name = f"{family.name}_total" if family.type == "counter" else family.name
        found[name] = (family.type, ", ".join(f"`{label}`" for label in metric._labelnames))  # type: ignore[attr-defined]
    return found


def test_the_table_of_metrics_is_the_registry(exported: dict[str, tuple[str, str]]) -> None:
    table = {name.strip("`"): (kind, labels) for name, kind, labels, _ in rows("operations.md", "name")}
    assert table == exported


def test_the_dashboard_asks_for_metrics_that_exist(exported: dict[str, tuple[str, str]]) -> None:
    dashboard = json.loads((DOCS / "grafana" / "kvcmas.json").read_text())
    used = set()
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            for name, labels in re.findall(r"(kvcmas:\w+)(?:\{([^}]*)\})?", target["expr"]):
                plain = re.sub(r"_(bucket|sum|count)$", "", name)
                kind, label = exported[plain]
                assert (plain != name) == (kind == "histogram"), name
                grouped = re.findall(r"by \((\w+)\)", target["expr"])
                for asked in [*re.findall(r"(\w+)=", labels), *grouped]:
                    assert asked in ("instance", "le") or f"`{asked}`" == label, (name, asked)
                used.add(plain)
    assert used == set(exported)
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])


def test_the_tables_of_reasons_and_modes_are_the_closed_lists() -> None:
    assert {reason.strip("`") for reason, _, _ in rows("guide.md", "reason")} == {str(reason) for reason in Reason}
    values = [value.strip("`") for _, value, _ in rows("operations.md", "field")]
    assert values[: len(get_args(Mode))] == list(get_args(Mode))


def test_links_lead_to_files() -> None:
    pages = [*ROOT.glob("*.md"), *DOCS.glob("*.md")]
    assert len(pages) >= 6
    for page in pages:
        for link in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
            assert link.startswith("http") or (page.parent / link).exists(), (page.name, link)


def test_the_api_reference_holds_the_docstrings(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("api_reference", DOCS / "api_reference.py")
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    written = script.write(["kvcmas_sgl.radix_ext", "kvcmas_sgl.radix_ext.estimators"], tmp_path)
    assert {"kvcmas_sgl.radix_ext.gate", "kvcmas_sgl.radix_ext.estimators.affine"} <= set(written)
    page = (tmp_path / "kvcmas_sgl.radix_ext.gate.html").read_text()
    assert "Upper&nbsp;estimates:&nbsp;relative&nbsp;error&nbsp;of&nbsp;the&nbsp;corrected&nbsp;KV" in page
    index = (tmp_path / "index.html").read_text()
    assert all(f'href="{name}.html"' in index and (tmp_path / f"{name}.html").exists() for name in written)
