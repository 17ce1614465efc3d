"""The schema of what a cluster takes."""

import os
from pathlib import Path

import pytest
import yaml

from tests.jobs import ROOT


def schema() -> dict:
    """The schema of a JobSet, from its custom resource definition; unknown keys are mistakes."""
    path = Path(os.environ.get("JOBSET_CRD", ROOT.parent / "shared/data/jobset-crd.yaml"))
    if not path.is_file():
        pytest.skip(f"needs JobSet's custom resource definition: set JOBSET_CRD; not at {path}")
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    definition = yaml.load(path.read_text(), Loader=loader)
    [version] = [v for v in definition["spec"]["versions"] if v["name"] == "v1alpha2"]
    found = version["schema"]["openAPIV3Schema"]
    close(found)
    return found


def close(node):
    """Refuses keys that the schema does not list, as the API server does with strict fields."""
    if isinstance(node, list):
        for item in node:
            close(item)
    if isinstance(node, dict):
        if isinstance(node.get("properties"), dict) and "additionalProperties" not in node:
            node["additionalProperties"] = False
        for value in node.values():
            close(value)
