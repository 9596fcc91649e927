"""What a process tree needs before it imports SGLang without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys

from kvcmas_sgl.cpu.environment import STAND_IN, cpu_environment, default_cpu_args


def run(code: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)


def test_environment_is_set_once_and_keeps_what_the_user_set() -> None:
    once = cpu_environment({"PYTHONPATH": f"/mine{os.pathsep}/yours", "HF_HUB_OFFLINE": "0", "OTHER": "x"})
    assert once == {
        "PYTHONPATH": os.pathsep.join([str(STAND_IN), "/mine", "/yours"]),
        "HF_HUB_OFFLINE": "0",
        "OTHER": "x",
        "SGLANG_USE_CPU_ENGINE": "1",
        "SGLANG_NCCL_SO_PATH": "there-is-no-gpu",
    }
    assert cpu_environment(once) == once
    assert cpu_environment({})["HF_HUB_OFFLINE"] == "1"


def test_child_process_imports_the_stand_in_and_is_told_what_it_lacks() -> None:
    child = run("from sgl_kernel import rmsnorm; print(rmsnorm.__name__); rmsnorm(1)", cpu_environment(os.environ))
    assert child.stdout == "rmsnorm\n"
    assert "NotImplementedError: sgl_kernel.rmsnorm was called, but this machine runs without a GPU" in child.stderr


def test_this_process_finds_the_stand_in_whatever_was_on_the_path() -> None:
    code = """
import os, sys
from kvcmas_sgl.cpu.environment import STAND_IN, prepare_environment
prepare_environment(); prepare_environment()
assert sys.path.count(str(STAND_IN)) == 1 and os.environ["SGLANG_USE_CPU_ENGINE"] == "1"
import sgl_kernel
print(sgl_kernel.__file__)
"""
    plain = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "SGLANG_USE_CPU_ENGINE")}
    child = run(code, plain)
    assert child.stdout.strip() == str(STAND_IN / "sgl_kernel" / "__init__.py"), child.stderr


def test_too_late_is_said() -> None:
    code = """
import sys, types
sys.modules["sglang.srt.utils.common"] = types.ModuleType("common")
from kvcmas_sgl.cpu.environment import prepare_environment
prepare_environment()
"""
    plain = {name: value for name, value in os.environ.items() if name != "SGLANG_USE_CPU_ENGINE"}
    assert "RuntimeError: prepare_environment() must run before sglang is imported" in run(code, plain).stderr


def test_flags_that_were_given_win() -> None:
    flags = default_cpu_args(["--model-path", "m", "--attention-backend=torch_native", "--max-total-tokens", "9000"])
    assert flags == ["--device", "cpu", "--dtype", "bfloat16", "--sleep-on-idle"]
    assert default_cpu_args(default_cpu_args()) == []
