"""Manifests of other engines than SLURM, by the schemas of Kubernetes, JobSet and the trainer; and what kubectl is asked.

python -m pytest tests/unit/launch/test_kubernetes.py --update-goldens    writes jobs/golden/*.yaml anew; read the diff
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from slurmtrain.config.folders import shipped
from slurmtrain.runs.lookup import all_runs
from slurmtrain.runs.run_dir import RunDir
from tests.support.fake_kubectl import FakeKubectl
from tests.support.runs import add_attempt, printed, refused, shown
from tests.support.tables import cells_of, words_of

GOLDENS = shipped("jobs") / "golden"
SCHEMAS = {
    "JobSet": "JobsetV1alpha2JobSet",
    "TrainingRuntime": "TrainerV1alpha1TrainingRuntime",
    "TrainJob": "TrainerV1alpha1TrainJob",
}
IMAGE = "cluster.pods.image=registry.example.com/slurmtrain:1"
EVERYTHING = [
    *("+cluster=kubernetes", "cluster.nodes=4", "job.name=My_run", "train.global_batch_size=32", IMAGE),
    *("cluster.pods.namespace=team-a", "cluster.pods.queue=gpus", "cluster.pods.host_network=true"),
    *("+cluster.pods.resources={rdma/hca: 8}", "+cluster.pods.secrets.WANDB_API_KEY=wandb/api-key"),
    *("+cluster.pods.node_selector={cloud.google.com/gke-accelerator: nvidia-h100-80gb}", "cluster.pods.fs_group=2000"),
    *("+cluster.pods.labels={team: a}", "+cluster.pods.annotations={prometheus.io/scrape: 'false'}"),
    *("cluster.pods.ttl_s=86400", "cluster.pods.pull_policy=Always", "cluster.setup=['ulimit -l unlimited']"),
    "+cluster.pods.spec={priorityClassName: high, serviceAccountName: train, imagePullSecrets: [{name: registry}]}",
    "+cluster.pods.volumes={SHARED: lustre, /scratch: {hostPath: {path: /local/scratch}}}",
]
NO_VOLUMES_OF_SKYPILOT = ("+cluster.pods.volumes", "+cluster.pods.resources")
GOLDEN_WORDS = dict.fromkeys(["jobset", "trainjob", "rayjob"], EVERYTHING) | {
    "skypilot": [
        *(word for word in EVERYTHING if not word.startswith(NO_VOLUMES_OF_SKYPILOT)),
        "+cluster.pods.volumes={SHARED: lustre}",
    ]
}


def here(words: list[str], project: Path) -> list[str]:
    return [word.replace("SHARED", str(project)) for word in words]


def documents(*words: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(printed(*words, "render")))


def pod_of(document: dict[str, Any]) -> dict[str, Any]:
    if document["kind"] == "RayJob":
        worker: dict[str, Any] = document["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]["template"]
        return worker
    spec = document["spec"] if document["kind"] == "JobSet" else document["spec"]["template"]["spec"]
    pod: dict[str, Any] = spec["replicatedJobs"][0]["template"]["spec"]["template"]
    return pod


def check_by_schema(document: dict[str, Any]) -> None:
    """Every field is one that the schema knows, with the type that it has there."""
    if "kind" not in document:  # SkyPilot's, see tests/distributed/test_engines.py
        return
    if document["kind"] == "RayJob":
        head = document["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]
        for pod in (head, pod_of(document)):
            found = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "x"}, "template": pod}
            kubernetes_validate.validate(found, "1.37", strict=True)
        return
    from kubeflow_trainer_api import models  # not by every process that collects this file: it takes a second

    schema = getattr(models, SCHEMAS[document["kind"]])
    parsed = schema.from_dict(document)
    assert parsed is not None and parsed.to_dict() == document
    if document["kind"] == "TrainJob":
        return
    spec = document["spec"] if document["kind"] == "JobSet" else document["spec"]["template"]["spec"]
    for replicated in spec["replicatedJobs"]:
        job = {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {"name": "x"},
            "spec": replicated["template"]["spec"],
        }
        kubernetes_validate.validate(job, "1.37", strict=True)


@pytest.mark.parametrize("target", GOLDEN_WORDS)
def test_the_manifest_is_the_golden_one_and_fits_the_schemas(
    target: str, project: Path, request: pytest.FixtureRequest
) -> None:
    text = printed(*here(GOLDEN_WORDS[target], project), "render", "--target", target)
    for document in yaml.safe_load_all(text):
        check_by_schema(document)
    text = text.replace(str(project), "/home/me/project")
    text = re.sub(r"(runAsUser|runAsGroup): \d+", r"\1: 1000", text).replace(f"user-{os.getuid()}", "user-1000")
    golden = GOLDENS / f"{target}.yaml"
    if request.config.getoption("--update-goldens"):
        golden.write_text(text)
    assert text == golden.read_text()


@pytest.mark.parametrize("target", ["jobset", "trainjob", "rayjob"])
def test_a_config_for_slurm_shows_its_manifest_without_further_words(
    target: str, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = printed("+cluster=a100x4", "cluster.nodes=2", "render", "--target", target)
    assert "take the place of IMAGE and CLAIM" in capsys.readouterr().err
    found = list(yaml.safe_load_all(text))
    for document in found:
        check_by_schema(document)
    (container,) = pod_of(found[0])["spec"]["containers"]
    assert container["resources"]["limits"] == {"memory": "480Gi", "nvidia.com/gpu": "4"}
    assert pod_of(found[0])["spec"]["terminationGracePeriodSeconds"] == 300 + 30
    assert list(project.iterdir()) == []


NEEDED = [IMAGE, "+cluster.pods.volumes={SHARED: claim}"]
# What is said of words beside NEEDED; or without it, where a row has a part of it.
TABLE = """
VOLUME  ->  cluster.pods.image is not set
IMAGE  ->  no volume of the pods contains the run directory
cluster.nodes=2-4  ->  cluster.nodes=2-4 needs a fixed number of pods
cluster.container={kind: apptainer, image: x.sif}  ->  the container of a pod is cluster.pods.image
+secrets.WANDB_API_KEY=env  ->  takes WANDB_API_KEY from the environment, and pods do not inherit that of this shell
+cluster.pods.secrets.TOKEN=wandb  ->  cluster.pods.secrets.TOKEN='wandb' is not a key of a Secret
cluster.pods.queue=My_queue  ->  is not a name as Kubernetes has them
+cluster.pods.resources={memory: 2GB}  ->  '2GB' is not a quantity as Kubernetes has
cluster.pods.shm_gb=64Gi  ->  cluster.pods.shm_gb is a number of GiB, without a unit, such as 64
requeue=chain  ->  requeue.mode=chain needs SLURM: Kubernetes starts the same pods
preflight.mode=full  preflight.exclude_slow=true  ->  preflight.exclude_slow=true needs SLURM, which can leave nodes out
+cluster.pods.spec.volumes=[{name: scratch, emptyDir: {}}]  ->  would take the place of the run's own volumes
+cluster.pods.spec.securityContext={runAsUser: 0, runAsNonRoot: true}  ->  the pods would run as root
+cluster.pods.secrets.MASTER_ADDR=a/b  ->  cluster.pods.secrets has MASTER_ADDR, which the run sets itself
IMAGE  cluster.pods.target=skypilot  +cluster.pods.volumes={SHARED: {hostPath: {path: /x}}}  ->  one of SkyPilot's volumes
cluster.pods.target=skypilot  +cluster.pods.resources={rdma/hca: 8}  ->  has rdma/hca, and SkyPilot asks for
cluster.signal_lead_s=300  cluster.pods.grace_s=100  ->  cluster.pods.grace_s=100 is less than cluster.signal_lead_s=300
"""


@pytest.mark.parametrize(("words", "sentence"), cells_of(TABLE, 2))
def test_what_cannot_work_in_pods_is_refused_before_anything_is_made(
    words: str, sentence: str, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "none-of-your-business")
    parts = dict(zip(("IMAGE", "VOLUME"), NEEDED, strict=True))
    own = [parts.get(word, word) for word in words_of(words)]
    given = own if own[0] in NEEDED else [*NEEDED, *own]
    assert sentence in refused("+cluster=kubernetes", *here(given, project), "render", code=78)
    assert list(project.iterdir()) == []


def test_the_object_its_container_and_the_mounts_of_volumes_take_what_else_a_cluster_wants(project: Path) -> None:
    words = [
        *("+cluster=kubernetes", IMAGE, "+cluster.pods.resources={rdma/hca: 8}"),
        "+cluster.pods.volumes={SHARED: {claim: team, subPath: me}, /data: {claim: sets, readOnly: true}}",
        "+cluster.pods.container.env=[{name: POD_IP, valueFrom: {fieldRef: {fieldPath: status.podIP}}}]",
        "+cluster.pods.container.securityContext.capabilities.add=[SYS_PTRACE]",
        "+cluster.pods.object={spec: {coordinator: {replicatedJob: node}}, metadata: {annotations: {team: a}}}",
    ]
    (found,) = documents(*here(words, project))
    check_by_schema(found)
    assert found["spec"]["coordinator"] == {"replicatedJob": "node"}
    assert found["metadata"]["annotations"] == {"team": "a"}
    spec = pod_of(found)["spec"]
    (container,) = spec["containers"]
    assert [each["persistentVolumeClaim"]["claimName"] for each in spec["volumes"][:2]] == ["team", "sets"]
    first, second = container["volumeMounts"][:2]
    assert (first["mountPath"], first["subPath"], second["readOnly"]) == (str(project), "me", True)
    assert container["env"][-1]["name"] == "POD_IP" and container["env"][0]["name"] == "MASTER_ADDR"
    assert container["securityContext"]["capabilities"]["add"] == ["SYS_PTRACE", "IPC_LOCK"]  # RDMA pins memory


# submit and what follows, with a kubectl that is none.


@pytest.fixture
def kubectl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeKubectl:
    fake = FakeKubectl.install(tmp_path / "kubectl")
    monkeypatch.setenv("PATH", f"{fake.directory}:{os.environ['PATH']}")
    return fake


def submitted(project: Path, *words: str) -> RunDir:
    printed("+cluster=kubernetes", "cluster.gpu_memory_gb=null", *here([*NEEDED, *words], project), "submit")
    return all_runs(project / "runs")[-1]


def test_submit_creates_one_object_of_the_frozen_run(project: Path, kubectl: FakeKubectl) -> None:
    run = submitted(project)
    ((name, made),) = kubectl.objects.items()
    assert run.info()["job_ids"] == [name.partition("/")[2]]
    assert made == yaml.safe_load(run.manifest.read_text())
    (container,) = pod_of(made)["spec"]["containers"]
    assert container["command"][-2:] == ["supervise", str(run.path)] and not run.script.exists()


@pytest.mark.parametrize("target", ["jobset", "trainjob"])
def test_a_submission_that_was_interrupted_is_completed_by_resume_and_never_made_twice(
    target: str, project: Path, kubectl: FakeKubectl
) -> None:
    run = submitted(project, f"cluster.pods.target={target}")
    made = kubectl.objects
    run.update_info(job_ids=[])  # killed before it could note the object
    assert "has not ended: starting" in refused("resume", run.id, code=1)
    assert kubectl.objects == made
    for name in made:
        kubectl.remove(name)  # killed before kubectl has made it
    printed("resume", run.id)
    assert kubectl.objects == made and len(run.info()["job_ids"]) == 1


def test_what_kubernetes_refuses_leaves_nothing_behind(project: Path, kubectl: FakeKubectl) -> None:
    kubectl.fail('error: jobsets.jobset.x-k8s.io is forbidden: User "me" cannot create resource')
    words = ("+cluster=kubernetes", "cluster.gpu_memory_gb=null", *here(NEEDED, project), "submit")
    said = refused(*words, code=1)
    assert 'kubectl create has failed: error: jobsets.jobset.x-k8s.io is forbidden: User "me" cannot' in said
    assert list(project.glob("runs/*/*")) == []


def conditions(*types: str) -> dict[str, Any]:
    return {"conditions": [{"type": each, "status": "True", "message": f"said {each}"} for each in types]}


STATES: dict[str, tuple[dict[str, Any], dict[str, Any] | None, str, str]] = {
    "waits for Kueue": ({"spec": {"suspend": True}}, None, "waiting", "is suspended"),
    "was preempted, and waits": (
        {"spec": {"suspend": True}},
        {"reason": "asked", "verdict": "requeue", "sentence": "told to stop by SIGTERM; it starts again"},
        "requeued",
        "told to stop by SIGTERM; it starts again; train-",
    ),
    "was given up by Kubernetes": (
        {"status": conditions("Failed")},
        {"started": 1.0, "host": "far", "pid": 1},
        "lost",
        "failed: said Failed",
    ),
    "has finished": (
        {"status": conditions("Completed")},
        {"reason": "finished", "verdict": "done", "sentence": "finished"},
        "finished",
        "finished",
    ),
}


@pytest.mark.parametrize("name", STATES)
def test_status_reads_the_run_directory_and_asks_whether_the_pods_run(
    name: str, project: Path, kubectl: FakeKubectl
) -> None:
    changes, attempt, state, sentence = STATES[name]
    run = submitted(project)
    (made,) = kubectl.objects
    kubectl.change(made, **changes)
    if attempt is not None:
        add_attempt(run, job_id=run.info()["job_ids"][0], **attempt)
    found = shown("status", run.id)
    assert (found["state"], sentence in found["sentence"]) == (state, True), found


@pytest.mark.parametrize("target", ["trainjob", "rayjob"])
def test_an_object_that_is_created_by_hand_has_its_status_and_resume_makes_the_next(
    target: str, project: Path, kubectl: FakeKubectl
) -> None:
    own = ["+cluster=kubernetes", "cluster.gpu_memory_gb=null", *here(NEEDED, project)]
    printed(*own, "render", "--target", target, "-o", "run.yaml")
    (run,) = all_runs(project / "runs")
    found = shown("status", run.id)
    assert found["state"] == "prepared" and f"kubectl create -f {run.manifest}" in found["sentence"]
    kubectl.create(project / "run.yaml")
    found = shown("status", run.id)
    assert found["state"] == "starting" and f"kubectl get pods -l slurmtrain/run={run.id}" in found["sentence"]
    name = list(kubectl.objects)[-1].partition("/")[2]
    add_attempt(run, job_id=name, host="far", pid=1)
    assert shown("status", run.id)["state"] == "running"
    assert "is told to end" in printed("cancel", run.id)
    assert kubectl.objects == {} and shown("status", run.id)["state"] == "stopped"
    printed("resume", run.id)
    assert run.info()["job_ids"] == [name, f"{name[:-1]}1"]
    assert {each.partition("/")[2] for each in kubectl.objects} == {f"{name[:-1]}1"}


def test_a_task_of_skypilot_is_not_a_matter_of_kubectl(project: Path, kubectl: FakeKubectl) -> None:
    own = ["+cluster=kubernetes", "cluster.gpu_memory_gb=null", *here(NEEDED, project)]
    assert "sky jobs launch FILE" in refused(*own, "cluster.pods.target=skypilot", "submit", code=1)
    assert all_runs(project / "runs") == []
    printed(*own, "render", "--target", "skypilot", "-o", "task.yaml")
    (run,) = all_runs(project / "runs")
    assert "kubectl does not know SkyPilot's tasks; attempt 1 is next" in shown("status", run.id)["sentence"]
    assert "kubectl does not know SkyPilot's tasks" in refused("cancel", run.id, code=1)
    assert kubectl.calls == []


def test_without_an_answer_status_says_what_the_files_know_and_resume_whom_to_wait_for(
    project: Path, kubectl: FakeKubectl
) -> None:
    run = submitted(project)
    kubectl.fail("The connection to the server localhost:8080 was refused")
    found = shown("status", run.id)
    assert found["state"] == "unknown" and "was refused; attempt 1 is next" in found["sentence"]
    assert "try again when kubectl answers" in refused("resume", run.id, code=1)


def test_preempt_stops_the_pods_and_leaves_their_object(project: Path, kubectl: FakeKubectl) -> None:
    run = submitted(project)
    job = run.info()["job_ids"][0]
    add_attempt(run, job_id=job, host="far", pid=1)
    assert "is told to save and leave" in printed("preempt", run.id)
    selector = f"--selector=slurmtrain/name=train,slurmtrain/run={run.id}"
    assert kubectl.calls[-1] == ["delete", "pods", selector, "--wait=false"] and len(kubectl.objects) == 1
