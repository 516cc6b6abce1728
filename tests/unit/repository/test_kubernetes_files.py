"""Tests of Kubernetes files: unprivileged pods, pinned images and network policies."""

from pathlib import Path

import pytest
import yaml

FILES = sorted((Path(__file__).parents[3] / "scripts/launch").glob("kubernetes_*.yaml"))


def pod_specs(value):
    """Yield every object with containers, at any depth."""
    if isinstance(value, dict):
        if "containers" in value:
            yield value
        for item in value.values():
            yield from pod_specs(item)
    elif isinstance(value, list):
        for item in value:
            yield from pod_specs(item)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_pods_run_without_privileges(file):
    documents = list(yaml.safe_load_all(file.read_text()))
    pods = list(pod_specs(documents))
    assert pods
    for pod in pods:
        context = pod["securityContext"]
        assert context["runAsNonRoot"] is True and context["runAsUser"] > 0
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["automountServiceAccountToken"] is False
        for container in pod["containers"]:
            limits = container["securityContext"]
            assert limits["allowPrivilegeEscalation"] is False
            assert limits["capabilities"] == {"drop": ["ALL"]}
            assert "@sha256:" in container["image"]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_network_policy_limits_ingress(file):
    documents = list(yaml.safe_load_all(file.read_text()))
    (policy,) = [d["spec"] for d in documents if d["kind"] == "NetworkPolicy"]
    assert policy["policyTypes"] == ["Ingress"] and policy["podSelector"]
    sources = [source for rule in policy["ingress"] for source in rule["from"]]
    assert sources and all(list(source) == ["podSelector"] for source in sources)
    assert all(source["podSelector"] for source in sources)


def test_pods_with_workers_have_shared_memory():
    for file in FILES:
        for pod in pod_specs(list(yaml.safe_load_all(file.read_text()))):
            mounts = {m["mountPath"] for c in pod["containers"] for m in c["volumeMounts"]}
            volumes = [v.get("emptyDir", {}).get("medium") for v in pod["volumes"]]
            is_registry = pod["containers"][0]["name"] == "registry"
            assert is_registry or ("/dev/shm" in mounts and "Memory" in volumes)
