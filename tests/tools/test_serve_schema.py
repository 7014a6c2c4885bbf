"""The OpenAPI schema of `jaxrl serve` describes what the server does."""

from __future__ import annotations

import subprocess
import sys

import pytest
from test_serve import scripted

# Each request of the schema is tried with valid and with invalid values, chosen by a seed. A valid one may be refused
# all the same, because the schema knows no limits of this server, such as its vocabulary.
OPTIONS = ["--phases", "coverage,fuzzing", "--max-examples", "10", "--seed", "1", "--generation-deterministic"]
OPTIONS += ["--exclude-checks", "positive_data_acceptance", "--request-timeout", "20", "--no-color"]


@pytest.mark.slow
@pytest.mark.needs("schemathesis")
def test_each_route_answers_as_the_schema_says(tmp_path, monkeypatch):
    with scripted() as served:
        monkeypatch.setattr(served.service, "check_model", lambda name: None)  # the schema knows no name of a model
        command = [sys.executable, "-m", "schemathesis.cli", "run", f"{served.url}/openapi.json", *OPTIONS]
        run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert run.returncode == 0, run.stdout + run.stderr
        assert "Tested: 12" in run.stdout and served.gauge("completions_total") > 50
        assert (served.gauge("running"), served.gauge("waiting")) == (0, 0)
