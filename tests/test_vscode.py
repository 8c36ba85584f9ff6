"""What the backend of DaCe's VS Code extension does with our file of transformations, step by step.

Its functions are `add_custom_transformations`, `get_transformations` and `apply_transformations`, which load a file by
its path as a module of that name, list matches as JSON, and apply what comes back as JSON.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]

BACKEND = """
import importlib.util, json, sys
path = sys.argv[1]
spec = importlib.util.spec_from_file_location(path, path)
module = importlib.util.module_from_spec(spec)
sys.modules[path] = module
spec.loader.exec_module(module)

from dace import SDFG, config, serialize
from dace.transformation.optimizer import SDFGOptimizer
from dace.transformation.transformation import PatternTransformation

text = open(sys.argv[2]).read()
sdfg = SDFG.from_json(json.loads(text))
with config.set_temporary("testing", "serialize_all_fields", value=True):
    matches = list(SDFGOptimizer(sdfg).get_pattern_matches(permissive=False))
    sent = json.dumps([m.to_json() for m in matches])
docs = {type(m).__name__: m.__doc__ for m in matches}
names = [made["transformation"] for made in json.loads(sent)]
assert "DacemlFuseElementwise" in names, names
assert "=>" in docs["DacemlFuseElementwise"]

sdfg = SDFG.from_json(json.loads(text))
before = len(sdfg.nodes()[0].nodes())
chosen = next(made for made in json.loads(sent) if made["transformation"] == "DacemlFuseElementwise")
transformation = serialize.from_json(chosen)
assert isinstance(transformation, PatternTransformation)
transformation._sdfg = sdfg.cfg_list[transformation.cfg_id]
transformation.apply_pattern(sdfg)
again = SDFG.from_json(json.loads(json.dumps(sdfg.to_json())))
assert len(again.nodes()[0].nodes()) < before
print("applied", chosen["transformation"])
"""


def test_the_backend_loads_lists_and_applies(tmp_path: Path) -> None:
    from daceml_train.sdfg.convert import to_sdfg
    from tests.transformations.checking import program

    graph = program("x: f32[4, 8]", "%a = exp(%x)\n%b = neg(%a)\n%y = tanh(%b)", "%y")
    to_sdfg(graph).save(str(tmp_path / "step.sdfg"))
    file = ROOT / "daceml_train" / "sdfg/transformations.py"
    command = [sys.executable, "-c", BACKEND, str(file), str(tmp_path / "step.sdfg")]
    run = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=None, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    assert run.stdout.strip().endswith("applied DacemlFuseElementwise")
