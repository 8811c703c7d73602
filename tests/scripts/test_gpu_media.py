"""The comparison of images on a GPU, without one: every kind that it is made for passes."""

import importlib

import pytest
from ranks import REPOSITORY


@pytest.mark.stress
def test_every_kind_passes_on_a_cpu(monkeypatch: pytest.MonkeyPatch):
    """A dry run has one of them."""
    monkeypatch.syspath_prepend(str(REPOSITORY / "scripts"))
    media, figures = (importlib.import_module(name) for name in ("gpu_media", "gpu_figures"))
    findings = figures.Findings()
    for kind in media.KINDS:
        with findings.part(kind):
            media.Media(findings, "cpu", is_dry=True).images(kind)
    assert (findings.wrong, findings.failed, findings.not_offered) == ([], [], {})
