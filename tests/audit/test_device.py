import dataclasses

import pytest

from dpbilevel import audit
from dpbilevel.audit import device
from dpbilevel.cli.main import main
from dpbilevel.privacy.exact import matmul_check
from tests.cli.test_cli import config, failure  # noqa: F401


@pytest.fixture
def few(monkeypatch):
    short = matmul_check._BEFORE_SUMS
    found = tuple(matmul_check.product_errors("float32", short))
    monkeypatch.setattr(device, "product_errors", lambda dtype: found)
    monkeypatch.setattr(device, "mixed_rows", tuple)
    return found


@pytest.fixture
def failed(few, monkeypatch):
    one = dataclasses.replace(few[0], ratio=4100.0, case="few terms")
    monkeypatch.setattr(device, "product_errors", lambda dtype: (one, *few[1:]))


def test_the_command_prints_every_product_the_device_and_the_release_of_jax(capsys):
    assert main(["device"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("matrix products on cpu (cpu), JAX 0.1")
    assert len(lines) == 3 + len(matmul_check.PRODUCTS)
    for line, product in zip(lines[1:], matmul_check.PRODUCTS, strict=False):
        assert line.startswith(f"  passed  float32  {product}")
        assert "of the bound (" in line
    assert lines[-2].startswith("all within the bound")
    assert lines[-1].startswith("no record changes another's values in a product")


def test_the_command_ends_with_status_one_if_records_are_mixed(
    few, capsys, monkeypatch
):
    monkeypatch.setattr(device, "mixed_rows", lambda: ("running sums",))
    assert main(["device"]) == 1
    found = capsys.readouterr().out.splitlines()[-1]
    assert found.startswith("FAILED: records change each other's values in running")


def test_the_command_ends_with_status_one_and_says_what_to_do(failed, capsys):
    assert main(["device"]) == 1
    out = capsys.readouterr().out
    assert "FAILED  float32  gkp,gkq->gpq k=64 p=128 q=128" in out
    assert "4.1e+03 of the bound (few terms)" in out
    assert "Use another device, for example the CPU with JAX_PLATFORMS=cpu" in out


def test_the_outcome_in_python_is_what_the_command_prints(few, capsys):
    found = audit.device_arithmetic()
    assert found.passed
    assert found.errors == few
    main(["device"])
    assert capsys.readouterr().out == f"{found}\n"


def test_float64_is_audited_where_it_is_enabled(x64, monkeypatch):
    seen = []
    monkeypatch.setattr(
        device, "product_errors", lambda dtype: seen.append(dtype) or ()
    )
    monkeypatch.setattr(device, "mixed_rows", tuple)
    audit.device_arithmetic()
    assert seen == ["float32", "float64"]


def test_a_run_on_such_a_device_is_refused_before_it_spends(
    config,  # noqa: F811
    tmp_path,
    capsys,
    monkeypatch,
):
    coarse = matmul_check.ProductError(
        matmul_check.PRODUCTS[0], "float32", 4100.0, "few terms"
    )
    monkeypatch.setattr(matmul_check, "_worst", lambda device, dtype: coarse)
    text = failure(capsys, "run", config, "--out", str(tmp_path / "out"))
    assert "run: on cpu (cpu, JAX" in text
    assert not (tmp_path / "out").exists()
