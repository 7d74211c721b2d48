"""The built children and the merged overlay, held against the real API server."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from kvpilot_operator.core import children, naming
from kvpilot_operator.core.api_types import LLMDeploymentSpec, parse_spec
from kvpilot_operator.core.drift import find_drift
from kvpilot_operator.core.keys import NamespacedName
from kvpilot_operator.core.overlay import MERGE_KEYS, merge_pod_template
from kvpilot_operator.core.pod_template import build_pod_template
from kvpilot_tools.kubectl import Kubectl, KubectlError, wait_for
from kvpilot_tools.manifests import Object

pytestmark = pytest.mark.apiserver

SPECS: dict[str, dict[str, Any]] = {
    "plain": {},
    "cpu": {"engine": {"device": "cpu"}, "resources": {"requests": {"cpu": 1}, "limits": {"memory": "1.5Gi"}}},
    "everything": {
        "model": {
            "source": "pvc://models/llama/8b.gguf",
            "servedNames": ["a", "b"],
            "accessTokenSecret": {"name": "hf", "key": "token"},
            "cache": {"persistentVolumeClaim": "cache"},
        },
        "engine": {"apiKeySecret": {"name": "api", "key": "key"}, "tensorParallelSize": 2, "extraArgs": ["--seed=1"]},
        "resources": {"limits": {"memory": "64Gi", "cpu": "1000m"}, "sharedMemory": "16Gi"},
        "service": {"type": "LoadBalancer", "port": 80, "annotations": {"example.com/a": "b"}},
        "rollout": {"maxSurge": "25%", "maxUnavailable": 0},
    },
}

OVERLAYS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "labels": {"metadata": {"labels": {"team": "a"}, "annotations": {"example.com/a": "b"}}},
    "placement": {
        "spec": {
            "nodeSelector": {"gpu": "h100"},
            "tolerations": [{"key": "gpu", "operator": "Exists"}],
            "runtimeClassName": "nvidia",
            "serviceAccountName": "engine",
            "priorityClassName": "high",
            "imagePullSecrets": [{"name": "pull"}],
            "topologySpreadConstraints": [{"topologyKey": "zone", "maxSkew": 1, "whenUnsatisfiable": "ScheduleAnyway"}],
            "hostAliases": [{"ip": "10.0.0.1", "hostnames": ["a"]}],
        }
    },
    "volumes and environment": {
        "spec": {
            "volumes": [{"name": "data", "hostPath": {"path": "/data"}}],
            "containers": [
                {
                    "name": "engine",
                    "env": [{"name": "A", "value": "1"}, {"name": "HOME", "value": "/elsewhere"}],
                    "volumeMounts": [{"name": "data", "mountPath": "/data"}],
                    "ports": [{"containerPort": 9000, "name": "debug"}],
                    "resources": {"limits": {"ephemeral-storage": "1Gi"}},
                }
            ],
        }
    },
    "another kind of volume": {
        "spec": {"volumes": [{"name": "cache", "emptyDir": None, "hostPath": {"path": "/cache"}}]}
    },
    "sidecar": {
        "spec": {
            "containers": [{"name": "sidecar", "image": "busybox"}],
            "initContainers": [{"name": "init", "image": "busybox"}],
        }
    },
    "nulls": {"spec": {"securityContext": {"runAsUser": None, "runAsGroup": None}, "enableServiceLinks": None}},
    "an element away": {"spec": {"containers": [{"name": "engine", "env": [{"name": "USER", "$patch": "delete"}]}]}},
    "another kind of volume without a null": {
        "spec": {"volumes": [{"name": "cache", "$retainKeys": ["name", "hostPath"], "hostPath": {"path": "/cache"}}]}
    },
    "an element taken away and put anew": {
        "spec": {"volumes": [{"name": "cache", "$patch": "delete"}, {"name": "cache", "hostPath": {"path": "/cache"}}]}
    },
    "the same the other way round": {
        "spec": {"volumes": [{"name": "cache", "hostPath": {"path": "/cache"}}, {"name": "cache", "$patch": "delete"}]}
    },
    "an object emptied": {"spec": {"securityContext": {"$patch": "delete"}}},
    "a keyed list anew": {
        "spec": {
            "containers": [{"name": "engine", "env": [{"$patch": "replace"}, {"name": "A", "value": "1"}]}],
        }
    },
    "fields kept by name": {"spec": {"securityContext": {"$retainKeys": ["fsGroup", "runAsUser"], "runAsUser": 1000}}},
    "an object anew": {"spec": {"securityContext": {"$patch": "replace", "runAsUser": 1000}}},
    "a list anew": {
        "spec": {"containers": [{"name": "engine", "command": ["python3", "-X", "dev", "-m", "kvpilot_engine"]}]}
    },
}


def owner_in(kubectl: Kubectl, name: str) -> naming.Owner:
    """A real object: the garbage collector takes away what belongs to none."""
    kubectl.apply(
        {
            "apiVersion": "kvpilot.dev/v1alpha1",
            "kind": "LLMDeployment",
            "metadata": {"name": name},
            "spec": {"model": {"source": "hf://owner/model"}},
        }
    )
    item = kubectl.get("llmdeployment", name)
    assert item is not None
    return naming.Owner(NamespacedName(kubectl.namespace, name), item["metadata"]["uid"])


def spec_of(**spec: Any) -> LLMDeploymentSpec:
    return parse_spec({"spec": {"model": {"source": "hf://owner/model"}, **spec}})


def apply(kubectl: Kubectl, manifest: Object, *extra: str) -> Object:
    """Server-side apply as the operator does it; the server's answer."""
    answer: Object = json.loads(
        kubectl.run(
            *("apply", "--server-side", "--field-manager=kvpilot", "--show-managed-fields", "-o", "json", *extra),
            *("-f", "-"),
            stdin=json.dumps(manifest),
        )
    )
    return answer


def render(spec: LLMDeploymentSpec, owner: naming.Owner) -> list[Object]:
    template = build_pod_template(spec, owner, "example.com/engine:1")
    return [
        children.build_tuning_configmap(owner, {naming.TUNING_KEY: "{}"}),
        children.build_template_revision(owner, template, template_hash="t1", inputs_hash="i1", revision=1),
        children.build_service(spec, owner),
        children.build_pdb(owner),
        children.build_deployment(spec, owner, template, "t1"),
    ]


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
def test_applied_children_hold_all_that_was_rendered(kubectl: Kubectl, spec: dict[str, Any]) -> None:
    """Nothing that the server adds or writes its own way is taken for drift."""
    for manifest in render(spec_of(**spec), owner_in(kubectl, "rendered")):
        assert find_drift(manifest, apply(kubectl, manifest, "--dry-run=server")) == frozenset()


def test_apply_leaves_replicas_alone(kubectl: Kubectl) -> None:
    """The applied template never holds `replicas`: what /scale wrote stays, also when the render changes."""
    owner = owner_in(kubectl, "scaled")
    manifest = render(spec_of(), owner)[-1]
    apply(kubectl, manifest)
    kubectl.run("scale", "deployment", "scaled", "--replicas=4")
    assert apply(kubectl, manifest)["spec"]["replicas"] == 4
    assert apply(kubectl, render(spec_of(startup={"timeoutSeconds": 60}), owner)[-1])["spec"]["replicas"] == 4


@pytest.mark.parametrize("last", SPECS.keys())
def test_what_the_spec_no_longer_says_is_gone_from_the_children(kubectl: Kubectl, last: str) -> None:
    """After any changes the children are as if made at once: nothing of an earlier spec is left behind."""
    changed, fresh = owner_in(kubectl, f"changed-{last}"), owner_in(kubectl, f"fresh-{last}")
    for spec in (*SPECS.values(), SPECS[last]):
        answers = [apply(kubectl, manifest) for manifest in render(spec_of(**spec), changed)[2:]]
    for answer, manifest in zip(answers, render(spec_of(**SPECS[last]), fresh)[2:], strict=True):
        made = apply(kubectl, manifest)
        assert comparable(answer) == comparable(made, was="fresh", now="changed")


def test_hand_edit_is_drift_and_is_reverted_while_additions_stay(kubectl: Kubectl) -> None:
    """# C5"""
    owner = owner_in(kubectl, "edited")
    manifest = render(spec_of(), owner)[-1]
    apply(kubectl, manifest)
    patch = {"spec": {"template": {"spec": {"containers": [{"name": "engine", "image": "evil:1"}]}}}}
    kubectl.run("patch", "deployment", "edited", "-p", json.dumps(patch))
    kubectl.run("annotate", "deployment", "edited", "example.com/mine=kept")
    observed = kubectl.get("deployment", "edited")
    assert observed is not None
    (drift,) = find_drift(manifest, observed)
    assert drift.path == "spec.template.spec.containers[engine].image"
    mended = apply(kubectl, manifest, "--force-conflicts")
    assert find_drift(manifest, mended) == frozenset()
    assert mended["metadata"]["annotations"]["example.com/mine"] == "kept"


def test_stored_template_can_get_a_higher_number_but_no_other_data(kubectl: Kubectl) -> None:
    """What template pinning builds on: the highest revision is in use, its content never changes."""
    owner = owner_in(kubectl, "stored")

    def revision(number: int, image: str) -> Object:
        template = build_pod_template(spec_of(), owner, image)
        return children.build_template_revision(owner, template, template_hash="h", inputs_hash="i", revision=number)

    stored = apply(kubectl, revision(1, "a:1"))
    assert stored["data"]["template"] == build_pod_template(spec_of(), owner, "a:1")
    assert apply(kubectl, revision(3, "a:1"))["revision"] == 3
    with pytest.raises(KubectlError, match="immutable"):
        apply(kubectl, revision(3, "b:1"))


@pytest.mark.parametrize("overlay", OVERLAYS.values(), ids=OVERLAYS.keys())
def test_overlay_merges_as_the_servers_strategic_merge_patch(kubectl: Kubectl, overlay: dict[str, Any]) -> None:
    owner = owner_in(kubectl, "overlaid")
    spec = spec_of(resources={"limits": {"memory": "64Gi"}})
    base = build_pod_template(spec, owner, "example.com/engine:1")
    if kubectl.get("deployment", "overlaid") is None:
        kubectl.run("create", "-f", "-", stdin=json.dumps(children.build_deployment(spec, owner, base, "t1")))
    patch = json.dumps({"spec": {"template": overlay}})
    theirs = json.loads(
        kubectl.run(
            "patch", "deployment", "overlaid", "--dry-run=server", "-o", "json", "--type=strategic", "-p", patch
        )
    )
    merged = children.build_deployment(spec, owner, merge_pod_template(base, overlay), "t1")
    merged["metadata"]["name"] = "overlaid-by-us"
    ours = json.loads(kubectl.run("create", "--dry-run=server", "-o", "json", "-f", "-", stdin=json.dumps(merged)))
    assert sorted_lists(ours["spec"]["template"]) == sorted_lists(theirs["spec"]["template"])


def test_engine_pod_is_allowed_where_pods_are_restricted(kubectl: Kubectl) -> None:
    """Pod Security's strictest profile, as the API server itself applies it."""
    kubectl.run("create", "namespace", "restricted")
    kubectl.run("label", "namespace", "restricted", "pod-security.kubernetes.io/enforce=restricted")
    strict = replace(kubectl, namespace="restricted")
    wait_for(lambda: strict.get("serviceaccount", "default") is not None, "the service account", limit_s=30)
    owner = naming.Owner(NamespacedName("restricted", "engine"), "uid")
    template = build_pod_template(spec_of(**SPECS["everything"]), owner, "example.com/engine:1")
    pod = {"apiVersion": "v1", "kind": "Pod", **template, "metadata": {**template["metadata"], "name": "engine"}}
    strict.run("create", "--dry-run=server", "-f", "-", stdin=json.dumps(pod))
    pod["spec"]["containers"][0]["securityContext"]["allowPrivilegeEscalation"] = True
    with pytest.raises(KubectlError, match="violates PodSecurity"):
        strict.run("create", "--dry-run=server", "-f", "-", stdin=json.dumps(pod))


def test_bad_overlay_is_refused_by_apply_in_the_words_that_mean_invalid_spec(kubectl: Kubectl) -> None:
    """The schema can't know what a pod may hold: the server answers 500 with these words."""
    owner, spec = owner_in(kubectl, "bad-overlay"), spec_of()
    template = merge_pod_template(
        build_pod_template(spec, owner, "example.com/engine:1"), {"spec": {"nodeSelektor": {"a": "b"}}}
    )
    with pytest.raises(KubectlError, match="failed to create typed patch object"):
        apply(kubectl, children.build_deployment(spec, owner, template, "t1"))


def sorted_lists(value: Any, name: str = "") -> Any:
    """Lists that merge by key in the order of their keys: the patch's order is no promise of ours."""
    if isinstance(value, dict):
        return {key: sorted_lists(inner, key) for key, inner in value.items() if key != "creationTimestamp"}
    if isinstance(value, list):
        items = [sorted_lists(item) for item in value]
        return sorted(items, key=lambda item: str(item[MERGE_KEYS[name]])) if name in MERGE_KEYS else items
    return value


def comparable(item: Object, was: str = "", now: str = "") -> Any:
    """A child without what differs between two objects by themselves: names, addresses, versions."""
    text = json.dumps(item["spec"])
    spec = json.loads(text.replace(f"{was}-", f"{now}-") if was else text)
    for own in ("clusterIP", "clusterIPs", "healthCheckNodePort", "replicas"):
        spec.pop(own, None)
    for port in spec.get("ports", []):
        port.pop("nodePort", None)
    return spec
