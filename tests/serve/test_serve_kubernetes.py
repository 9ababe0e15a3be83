"""The manifests of ``deploy/kubernetes`` and of docs/deploy.md."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from serve_builders import FakeEngine, make_app

from shoal.config import load_config
from shoal.serve import ServerOptions

REPOSITORY = Path(__file__).parents[2]
KUBERNETES = REPOSITORY / "deploy" / "kubernetes"
BASE = KUBERNETES / "base"
CONFIGURATIONS = [BASE / "shoal.yaml", KUBERNETES / "gpu" / "shoal.yaml"]
KUBECTL = shutil.which("kubectl")


def read(path):
    return yaml.safe_load(path.read_text())


def pod():
    return read(BASE / "deployment.yaml")["spec"]["template"]["spec"]


def container():
    [container] = pod()["containers"]
    return container


def validate(resource):
    why = "kubernetes-validate, which has the schemas, is not installed"
    pytest.importorskip("kubernetes_validate", reason=why).validate(resource, "1.37", strict=True)


def examples():
    """The manifests in docs/deploy.md, by kind."""
    text = (REPOSITORY / "docs" / "deploy.md").read_text()
    blocks = re.findall(r"^```yaml\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return {each["kind"]: each for block in blocks for each in yaml.safe_load_all(block)}


@pytest.mark.parametrize("name", ["deployment.yaml", "service.yaml", "pvc.yaml"])
def test_kubernetes_accepts_the_base(name):
    validate(read(BASE / name))


def test_the_examples_name_each_other_and_the_base():
    found = examples()
    assert set(found) == {"ScaledObject", "InferencePool", "HTTPRoute", "ConfigMap"}
    deployment = read(BASE / "deployment.yaml")
    assert found["ScaledObject"]["spec"]["scaleTargetRef"]["name"] == deployment["metadata"]["name"]
    pool = found["InferencePool"]["spec"]
    assert pool["selector"] == deployment["spec"]["selector"]
    assert pool["targetPorts"] == [{"number": container()["ports"][0]["containerPort"]}]
    [backend] = found["HTTPRoute"]["spec"]["rules"][0]["backendRefs"]
    assert backend["name"] == found["InferencePool"]["metadata"]["name"]
    picker = yaml.safe_load(found["ConfigMap"]["data"]["plugins.yaml"])
    used = {plugin["pluginRef"] for plugin in picker["schedulingProfiles"][0]["plugins"]}
    assert used < {plugin["type"] for plugin in picker["plugins"]}


def test_kubernetes_accepts_the_example_that_it_knows():
    validate(examples()["ConfigMap"])


@pytest.fixture
def keyed(tmp_path):
    """The manifests, with keys."""
    folder = tmp_path / "kubernetes"
    shutil.copytree(KUBERNETES, folder)
    (folder / "base" / "keys.env").write_text("SHOAL_API_KEY=a\nSHOAL_ADMIN_KEY=b\n")
    return folder


@pytest.mark.parametrize("name", ["base", "gpu"])
def test_kubernetes_accepts_what_kustomize_makes(name, keyed):
    if KUBECTL is None:
        pytest.skip("kubectl is not installed")
    command = [KUBECTL, "kustomize", str(keyed / name)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    resources = {resource["kind"]: resource for resource in yaml.safe_load_all(done.stdout)}
    assert set(resources) == {"ConfigMap", "Secret", "Service", "PersistentVolumeClaim", "Deployment"}
    assert set(resources["Secret"]["data"]) == {"SHOAL_API_KEY", "SHOAL_ADMIN_KEY"}
    assert resources["ConfigMap"]["data"]["shoal.yaml"] == (keyed / name / "shoal.yaml").read_text()
    [container] = resources["Deployment"]["spec"]["template"]["spec"]["containers"]
    assert ("nvidia.com/gpu" in container["resources"]["limits"]) == (name == "gpu")
    for resource in resources.values():
        validate(resource)


def test_a_start_may_take_longer_than_loading_without_progress():
    probe = container()["startupProbe"]
    for path in CONFIGURATIONS:
        load_timeout_s = load_config(ServerOptions, file=path).cluster.load_timeout_s
        assert probe["periodSeconds"] * probe["failureThreshold"] > 2 * load_timeout_s


def test_probes_are_routes_that_need_no_key():
    app = make_app(FakeEngine())
    paths = {route.path for route in app.routes}
    probes = {name: container()[f"{name}Probe"]["httpGet"] for name in ("startup", "liveness", "readiness")}
    assert {probe["path"] for probe in probes.values()} <= paths
    assert probes["liveness"]["path"] == "/health/live"
    assert probes["readiness"]["path"] == "/health/ready"


@pytest.mark.parametrize("path", CONFIGURATIONS, ids=lambda path: path.parent.name)
def test_the_configuration_fits_the_deployment(path):
    config = load_config(ServerOptions, file=path)
    assert pod()["terminationGracePeriodSeconds"] > config.server.drain_s
    assert (config.server.host, config.server.port) == ("0.0.0.0", container()["ports"][0]["containerPort"])
    assert config.engine_plans()


def test_cpu_engines_have_as_many_threads_as_the_container_may_use():
    config = load_config(ServerOptions, file=BASE / "shoal.yaml")
    [plan] = config.engine_plans()
    assert str(plan.options.threads) == container()["resources"]["limits"]["cpu"]


def test_keys_are_not_in_the_repository():
    # A variable that is set but empty ends the start: test_cli_serve.py.
    assert (BASE / "keys.env.example").read_text() == "SHOAL_API_KEY=\nSHOAL_ADMIN_KEY=\n"
    assert "/deploy/kubernetes/base/keys.env" in (REPOSITORY / ".gitignore").read_text().split()


def test_volumes_are_those_that_are_mounted():
    mounts = {mount["name"]: mount["mountPath"] for mount in container()["volumeMounts"]}
    assert set(mounts) == {volume["name"] for volume in pod()["volumes"]}
    environment = {variable["name"]: variable["value"] for variable in container()["env"]}
    assert {environment["SHOAL_CACHE"], environment["HOME"]} <= set(mounts.values())
    assert container()["args"] == ["serve", "--config", f"{mounts['config']}/shoal.yaml"]


def test_the_image_has_the_user_and_the_folder_of_the_deployment():
    lines = (REPOSITORY / "Dockerfile").read_text().splitlines()
    user = pod()["securityContext"]
    assert f"USER {user['runAsUser']}:{user['runAsGroup']}" in lines
    [cache] = [each["value"] for each in container()["env"] if each["name"] == "SHOAL_CACHE"]
    assert {
        f"ENV SHOAL_CACHE={cache}",
        f"VOLUME {cache}",
        f"EXPOSE {container()['ports'][0]['containerPort']}",
    } <= set(lines)
