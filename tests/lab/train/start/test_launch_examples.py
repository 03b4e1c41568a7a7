"""The launch examples, held to the schemas of the tools that read them, and their commands to thinwire's own options."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from helpers.schemas import lost

from thinwire.lab.cli.options import parsed
from thinwire.lab.recipes import recipes
from thinwire.lab.train import RunConfig

ROOT = Path(__file__).parents[4]
LAUNCH = ROOT / "examples" / "launch"
SKYPILOT = ROOT / "tests" / "schemas" / "skypilot-task.json"


def trained(command: str) -> RunConfig:
    """The configuration that a `thinwire train` command stands for, which the command line's own parser reads."""
    words = shlex.split(re.sub(r"\\\n", " ", command))
    recipe, *options = words[words.index("train") + 1 :]
    return parsed(RunConfig, options, f"thinwire train {recipe}", recipes()[recipe].config)


def commands_of(text: str) -> list[str]:
    """Every `thinwire train` of a file, to the end of its line or lines."""
    return re.findall(r"(?:thinwire(?: \\\n#)?\s+)train (?:.*\\\n)*.*", text)


def as_jobset(read: dict) -> dict:
    """What Kubeflow's model of a JobSet keeps of a file."""
    from kubeflow_trainer_api.models import (
        JobsetV1alpha2JobSet,
    )  # takes seconds, which the other tests need not wait for

    return JobsetV1alpha2JobSet.from_dict(read).to_dict()


def test_the_dockerfile_is_one_by_hadolint():
    linter = Path(sys.executable).with_name("hadolint")
    done = subprocess.run([linter, LAUNCH / "Dockerfile"], capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stdout) == (0, "")
    copied = re.findall(r"pip install .*\[(.*)\]", (LAUNCH / "Dockerfile").read_text())
    assert copied == ["train,secure"]


def test_the_jobset_is_one_by_kubeflows_models_of_it():
    read = yaml.safe_load((LAUNCH / "jobset.yaml").read_text())
    assert list(lost(read, as_jobset(read))) == []
    lighthouse, worker = (job["template"]["spec"] for job in read["spec"]["replicatedJobs"])
    assert read["spec"]["successPolicy"]["targetReplicatedJobs"] == ["worker"]
    (container,) = worker["template"]["spec"]["containers"]
    config = trained(container["args"][0].replace("$JOB_COMPLETION_INDEX", "3"))
    assert config.elastic and config.resume and config.first_worker == 3 and config.workers == 1
    host, port = re.fullmatch(r"http://(.*):(\d+)", config.lighthouse).groups()
    name, job, pod, of, domain = re.fullmatch(r"(.*)-(\w+)-(\d)-(\d)\.(\w+)", host).groups()
    assert (name, job, pod, of, domain) == (read["metadata"]["name"], "lighthouse", "0", "0", read["metadata"]["name"])
    (container,) = lighthouse["template"]["spec"]["containers"]
    assert container["ports"] == [{"containerPort": int(port)}] and f"0.0.0.0:{port}" in container["args"]
    mounts = worker["template"]["spec"]["containers"][0]["volumeMounts"]
    assert str(config.output).startswith(mounts[0]["mountPath"])


def test_a_jobset_with_a_misspelt_field_would_be_seen():
    read = yaml.safe_load((LAUNCH / "jobset.yaml").read_text())
    read["spec"]["successPolicies"] = read["spec"].pop("successPolicy")
    assert list(lost(read, as_jobset(read))) == ["/spec/successPolicies"]


def test_the_skypilot_task_is_one_by_skypilots_schema():
    """`tests/schemas/skypilot-task.json` is what `sky.utils.schemas` of SkyPilot 0.14.1 (Apache 2.0) returns."""
    from jsonschema import Draft202012Validator

    schema = json.loads(SKYPILOT.read_text())
    task = yaml.safe_load((LAUNCH / "skypilot.yaml").read_text())
    validator = Draft202012Validator(schema)
    assert [error.message for error in validator.iter_errors(task)] == []
    wrong = task | {"resources": task["resources"] | {"cpu": 4}}
    assert any("'cpu' was unexpected" in error.message for error in validator.iter_errors(wrong))
    (command,) = commands_of(task["run"])
    config = trained(command.replace("$FIRST_WORKER", "1").replace("$LIGHTHOUSE", "http://100.64.0.1:29510"))
    assert config.elastic and config.first_worker == 1 and config.interface == "tailscale0"
    subprocess.run(["sh", "-n"], input=task["setup"] + task["run"], text=True, check=True, timeout=60)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd here")
def test_the_units_are_verified_by_systemd(tmp_path):
    """The program's path is replaced by one that exists, because systemd looks for it."""
    unit = (LAUNCH / "thinwire@.service").read_text().replace("/opt/thinwire/bin/thinwire", sys.executable)
    (tmp_path / "thinwire@.service").write_text(unit)
    for number in (0, 1):
        done = subprocess.run(
            ["systemd-analyze", "verify", "--man=no", tmp_path / f"thinwire@{number}.service"],
            capture_output=True,
            text=True,
            timeout=600,
        )
        said = [line for line in done.stderr.splitlines() if "thinwire" in line]
        assert done.returncode == 0 and said == [], done.stderr


def test_the_unit_and_the_dockerfile_run_commands_that_there_are():
    (line,) = re.findall(r"^ExecStart=(.*)", (LAUNCH / "thinwire@.service").read_text(), re.MULTILINE)
    config = trained(line.replace("%i", "1"))
    assert (
        config.elastic
        and config.resume
        and config.first_worker == 1
        and str(config.credentials) == "/etc/thinwire/keys"
    )
    words = (LAUNCH / "Dockerfile").read_text().replace("\\\n#", "")
    commands = re.findall(r"thinwire\s+(train .*)", words)
    assert [trained(command).first_worker for command in commands] == [0, 1]
