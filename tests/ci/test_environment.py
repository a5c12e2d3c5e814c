"""ci.venv, ci.cpu_env, ci.gpu_env, ci.device: when an environment is made, kept or refused, and what failures say."""

import fcntl
import importlib.metadata
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from ci import cpu_env, gpu_env, venv
from ci.console import UserError
from ci.device import detect_device

ROOT = Path(__file__).parents[2]


@pytest.fixture
def target(tmp_path, monkeypatch):
    """Where the environment goes; venv runs without pip, which takes seconds to unpack."""
    path = tmp_path / "env"
    monkeypatch.setenv("VENV", str(path))
    run = subprocess.run
    monkeypatch.setattr(
        "subprocess.run",
        lambda command, **kwargs: run([*command, *(["--without-pip"] if "venv" in command else [])], **kwargs),
    )
    return path


class Recorder:
    """An install function that counts its calls, and fails while told to."""

    def __init__(self):
        self.calls = 0
        self.error = None

    def __call__(self, environment):
        self.calls += 1
        (environment.path / "installed").write_text(str(self.calls))
        if self.error:
            raise self.error


@pytest.fixture
def install():
    return Recorder()


@pytest.fixture
def recipe(install, tmp_path):
    pins = tmp_path / "pins.py"
    pins.write_text("VERSION = 1")
    return venv.Recipe(device="cpu", newest_python=(3, 99), disk_bytes=1, install=install, sources=(pins,))


def test_first_run_makes_a_working_environment(target, recipe, install):
    assert venv.make(recipe) == target
    assert install.calls == 1
    prefix = venv.Venv(target).query("import sys; print(sys.prefix)")
    assert prefix == str(target)


def test_second_run_does_nothing(target, recipe, install):
    venv.make(recipe)
    venv.make(recipe)
    assert install.calls == 1


def test_changed_pins_update_in_place(target, recipe, install):
    venv.make(recipe)
    (target / "kept").write_text("")
    recipe.sources[0].write_text("VERSION = 2")
    venv.make(recipe)
    assert install.calls == 2
    assert (target / "kept").exists()


@pytest.mark.parametrize("error", [KeyboardInterrupt(), UserError("no network")])
def test_unfinished_environment_is_made_anew(target, recipe, install, error):
    install.error = error
    with pytest.raises(type(error)):
        venv.make(recipe)
    (target / "half-installed").write_text("")
    install.error = None
    venv.make(recipe)
    assert not (target / "half-installed").exists()
    venv.make(recipe)
    assert install.calls == 2


def test_interrupted_update_counts_as_unfinished(target, recipe, install):
    venv.make(recipe)
    recipe.sources[0].write_text("VERSION = 2")
    install.error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        venv.make(recipe)
    recipe.sources[0].write_text("VERSION = 1")
    install.error = None
    venv.make(recipe)
    assert install.calls == 3


def test_environment_whose_python_is_gone_is_made_anew(target, recipe, install):
    venv.make(recipe)
    (target / "bin" / "python").unlink()
    venv.make(recipe)
    assert install.calls == 2
    assert (target / "bin" / "python").exists()


def test_folder_of_somebody_else_is_left_alone(target, recipe, install):
    target.mkdir()
    (target / "thesis.txt").write_text("ten years")
    with pytest.raises(UserError, match="env was not made by this command: remove it, or set VENV to another folder"):
        venv.make(recipe)
    assert (target / "thesis.txt").read_text() == "ten years"
    assert install.calls == 0


def test_digest_follows_what_decides_the_environment(recipe, tmp_path):
    first = venv.digest(recipe, tmp_path / "a")
    assert venv.digest(recipe, tmp_path / "a") == first
    assert venv.digest(recipe, tmp_path / "b") != first
    recipe.sources[0].write_text("VERSION = 2")
    assert venv.digest(recipe, tmp_path / "a") != first


def test_second_process_waits_for_the_first(target, recipe, install, capfd):
    with target.with_name("env.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        second = threading.Thread(target=venv.make, args=(recipe,))
        second.start()
        while "another process is making" not in capfd.readouterr().err:
            assert second.is_alive()
        assert install.calls == 0
    second.join(60)
    assert install.calls == 1


def test_too_little_disk(target, recipe, install, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=3 << 30))
    small = venv.Recipe("cpu", (3, 99), 6 << 30, install, recipe.sources)
    with pytest.raises(UserError, match=r"needs 6.0 GiB of disk at .*env, and 3.0 GiB is free: free some space, or"):
        venv.make(small)
    assert not target.exists()


@pytest.mark.parametrize(("found", "fine"), [((3, 10), False), ((3, 11), True), ((3, 14), True), ((3, 15), False)])
def test_python_version(found, fine):
    if fine:
        venv.check_python((3, 14), found)
    else:
        with pytest.raises(UserError, match=rf"this is Python 3.{found[1]} and the environment needs 3.11 to 3.14"):
            venv.check_python((3, 14), found)


def test_python_without_ensurepip(monkeypatch):
    monkeypatch.setitem(sys.modules, "ensurepip", None)
    with pytest.raises(UserError, match=r"has no ensurepip module: install it \(on Debian and Ubuntu the package"):
        venv.check_venv_module()


@pytest.fixture
def pip(tmp_path):
    """Pip of the environment that the tests run in, with its log elsewhere."""
    environment = venv.Venv(Path(sys.prefix))
    environment.log = tmp_path / "pip.log"
    return lambda *arguments, **kwargs: environment.pip("a step", *arguments, **kwargs)


def test_no_network(pip, monkeypatch, offline_pip):
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    with pytest.raises(UserError, match="no package index could be reached during 'a step': check the network"):
        pip("download", "torch==2.13.0+cpu", explain_missing=cpu_env.explain_torch)


def test_index_without_the_cpu_build_of_torch(pip, offline_pip):
    with pytest.raises(UserError, match=r"no torch 2.13.0\+cpu \(the CPU build\).*: set PIP_EXTRA_INDEX_URL to"):
        pip("download", f"torch=={cpu_env.TORCH}", explain_missing=cpu_env.explain_torch)


def test_cpu_build_of_torch_that_a_constraints_file_hides(pip, offline_pip, tmp_path, monkeypatch):
    (tmp_path / "constraints.txt").write_text("torch<=2.14.1\n")
    monkeypatch.setenv("PIP_CONSTRAINT", str(tmp_path / "constraints.txt"))
    with pytest.raises(UserError, match=r"no torch 2.13.0\+cpu \(the CPU build\).*: set PIP_EXTRA_INDEX_URL to"):
        pip("download", f"torch=={cpu_env.TORCH}", explain_missing=cpu_env.explain_torch)


def test_package_that_is_not_there(pip, offline_pip):
    with pytest.raises(UserError, match=r"pip's package indexes have no nothing-of-the-kind==1.0 for Python 3\.\d+"):
        pip("download", "nothing-of-the-kind==1.0", explain_missing=cpu_env.explain_torch)


def test_pip_log_of_a_full_disk():
    log = "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device"
    assert "the disk filled up during 'a step'" in venv.explain_pip("a step", log)


@pytest.mark.parametrize("found", ["2.13.0 13.0", "2.13.0+cu130 13.0", "2.13.0 None"])
def test_torch_that_is_not_the_cpu_build(found):
    with pytest.raises(UserError, match=r"pip installed torch 2.13.0.* where 2.13.0\+cpu was asked for"):
        cpu_env.check_torch(found)


def test_torch_cpu_build():
    cpu_env.check_torch("2.13.0+cpu None")


class FakeVenv:
    """Notes what pip is asked for and answers the questions of a good environment."""

    def __init__(self):
        self.installed = []
        self.queries = []

    def pip(self, _title, *arguments, **_):
        self.installed.append(arguments)

    def query(self, code):
        self.queries.append(code)
        return "2.13.0+cpu None" if "version" in code else "cpu"


def test_flashinfer_comes_without_its_own_dependencies(capfd):
    """They are several GB of CUDA; what its Python imports is named one by one, beside the torch that is there."""
    environment = FakeVenv()
    cpu_env.install(environment)
    (alone,) = [
        arguments for arguments in environment.installed if f"flashinfer-python=={cpu_env.FLASHINFER}" in arguments
    ]
    assert alone == ("install", "--no-deps", f"flashinfer-python=={cpu_env.FLASHINFER}")
    (needs,) = [arguments for arguments in environment.installed if "einops" in arguments]
    assert needs[1] == f"torch=={cpu_env.TORCH}"
    assert environment.installed[-1][0] == "uninstall"
    assert any("import flashinfer" in code for code in environment.queries)


def test_contract_tests_describe_the_flashinfer_that_is_installed():
    assert importlib.metadata.version("flashinfer-python") == cpu_env.FLASHINFER


def test_flashinfer_imports_nothing_that_is_not_named():
    """In a process of its own, with the packages that only its full list of dependencies would bring hidden."""
    hidden = ("cuda", "cutlass", "cudnn", "nccl", "tilelang", "flashinfer_cubin")
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({hidden!r}))\n"
        "import flashinfer.decode, flashinfer.prefill, flashinfer.xqa, torch; print(torch.cuda.is_initialized())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["False"], done.stderr


def test_torch_without_its_gpu():
    gpu_env.check_cuda("2.13.0 13.0 True")
    with pytest.raises(UserError, match=r"torch 2.13.0 \(built for CUDA 13.0\) cannot use the GPU .* DEVICE=cpu"):
        gpu_env.check_cuda("2.13.0 13.0 False")


def test_the_name_vllm_is_metadata_only(tmp_path, offline_pip):
    """Built by pip for real: the distribution answers for its version and brings no module."""
    site = tmp_path / "site"

    def pip(_title, *arguments):
        command = [sys.executable, "-m", "pip", "--quiet", *arguments, "--target", str(site)]
        subprocess.run(command, check=True)

    cpu_env._install_vllm_name(SimpleNamespace(pip=pip))
    (found,) = importlib.metadata.distributions(path=[str(site)], name="vllm")
    assert found.version == "0.32.0+cpu"
    assert [path.name for path in site.iterdir() if not path.name.endswith(".dist-info")] == []


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    """Put an nvidia-smi with the given behaviour on PATH."""

    def write(script):
        tool = tmp_path / "bin" / "nvidia-smi"
        tool.parent.mkdir(exist_ok=True)
        tool.write_text(f"#!/bin/sh\n{script}\n")
        tool.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tool.parent}:/usr/bin:/bin")

    return write


@pytest.mark.parametrize(
    ("script", "device"),
    [
        ("echo 'GPU 0: NVIDIA H200 (UUID: GPU-1)'", "gpu"),
        ("echo 'No devices found.'", "cpu"),
        ("echo 'NVIDIA-SMI has failed because it could not communicate with the NVIDIA driver.'; exit 9", "cpu"),
    ],
)
def test_device_is_what_nvidia_smi_lists(nvidia_smi, script, device):
    nvidia_smi(script)
    assert detect_device() == device


def test_device_without_nvidia_smi(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert detect_device() == "cpu"


def test_device_can_be_set(nvidia_smi, monkeypatch):
    nvidia_smi("echo 'GPU 0: NVIDIA H200 (UUID: GPU-1)'")
    monkeypatch.setenv("DEVICE", "cpu")
    assert detect_device() == "cpu"


def test_bad_device_on_a_bare_python_is_one_sentence(monkeypatch):
    """-S and -E leave the standard library alone: nothing here may need an installed package."""
    command = [sys.executable, "-S", "-E", "-m", "ci.env"]
    environment = {"DEVICE": "tpu", "PATH": "/usr/bin:/bin"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == "error: DEVICE is 'tpu': set it to one of cpu, gpu, or leave it unset.\n"


def run_make(*arguments):
    """Run make as from a shell, also when make runs these tests."""
    outer = ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")
    environment = {name: value for name, value in os.environ.items() if name not in outer}
    command = ["make", "--no-print-directory", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("target_name", ["serve", "smoke", "test", "test-fast", "lint", "accuracy", "bench", "clean"])
def test_make_help_lists(target_name):
    assert f"\n  {target_name} " in run_make("help")


def test_make_passes_model_and_port():
    said = run_make("-n", "smoke", "MODEL=gemma", "PORT=9123", "VENV=/elsewhere", "ARGS=--seed 3")
    assert '/elsewhere/bin/python -m ci.serve --model "gemma" --port "9123" --once -- --seed 3' in said
