import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch


@pytest.fixture
def kernel_cache(triton_device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    from aidgn.training import kernel_cache

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    return kernel_cache


@pytest.mark.parametrize("job", ["blocks", "stem-and-weights", "transforms"])
def test_jobs_run_every_kernel(
    job: str, kernel_cache: ModuleType, triton_device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_cache, "IMAGE_SIZE", 32)  # the interpreter is slow
    monkeypatch.setattr(kernel_cache, "SLOT", 40)
    monkeypatch.setattr(kernel_cache, "BATCH", 1)
    launched = set()
    for module in (
        pytest.importorskip("aidgn.backbones.resnet_kernels"),
        pytest.importorskip("aidgn.data.transform_kernels"),
    ):
        for name in [name for name in vars(module) if name.endswith("_kernel")]:
            kernel = getattr(module, name)

            class Spy:
                def __init__(self, kernel: object, name: str):
                    self.kernel, self.name = kernel, name

                def __getitem__(self, grid: object) -> object:
                    launched.add(self.name)
                    return self.kernel[grid]  # type: ignore[index]

            monkeypatch.setattr(module, name, Spy(kernel, name))
    kernel_cache.JOBS[job](torch.device(triton_device))
    assert (
        launched
        == {
            "blocks": {"relu_gradient_kernel", "column_sums_kernel"},
            "stem-and-weights": {
                "fold_kernel",
                "fold_gradient_kernel",
                "pool_kernel",
                "pool_gradient_kernel",
                "relu_gradient_kernel",
                "column_sums_kernel",
            },
            "transforms": {"weights_kernel", "grey_sums_kernel", "pixels_kernel"},
        }[job]
    )


def test_a_process_runs_a_job(triton_device: str, tmp_path: Path) -> None:
    """As `compile_ahead` starts it, on a device without a number."""
    subprocess.run(
        [sys.executable, "-m", "aidgn.training.kernel_cache", "blocks", triton_device],
        env={**os.environ, "TRITON_CACHE_DIR": str(tmp_path)},
        check=True,
    )
    assert triton_device == "cpu" or list(tmp_path.rglob("relu_gradient_kernel*"))


def test_one_run_compiles_ahead(kernel_cache: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert kernel_cache.claim() and not kernel_cache.claim()
    monkeypatch.setattr("triton.__version__", "other")
    assert kernel_cache.claim() and not kernel_cache.claim()
    (tmp_path / "file").touch()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file" / "below"))
    assert not kernel_cache.claim()  # nowhere to keep compiled code


def test_no_process_without_a_gpu(kernel_cache: ModuleType) -> None:
    kernel_cache.compile_ahead(torch.device("cpu"))
    assert not kernel_cache._processes
