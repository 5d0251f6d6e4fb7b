"""The recipes of docs/howto/several_hosts.md that cannot be run here."""

from pathlib import Path

import pytest

MANIFEST = Path(__file__).parents[2] / "docs" / "howto" / "kubernetes.yaml"


def test_the_manifest_agrees_with_the_schema_of_kubernetes():
    """The schemas are 110 MB, so no extra of the package installs them: ``pip install kubernetes-validate``."""
    validator, yaml = pytest.importorskip("kubernetes_validate"), pytest.importorskip("yaml")
    manifest = yaml.safe_load(MANIFEST.read_text())
    validator.validate(manifest, "1.37", strict=True)
    manifest["spec"]["template"]["spec"]["container"] = []
    with pytest.raises(validator.ValidationError, match="'container' was unexpected"):
        validator.validate(manifest, "1.37", strict=True)
