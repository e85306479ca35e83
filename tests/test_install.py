"""What is installed from a wheel works by itself, away from any clone, and leaves everything else as it was.

The environment has the packages of this one, by links, but for ours, as an environment with Megatron-Bridge has before.
"""

import json
import os
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
OURS = ("qwen3vl_bridge", "_qwen3vl_bridge", "qwen3vl_recipes")


def build(source: Path, target: str, folder: Path) -> Path:
    command = [sys.executable, "-m", "hatchling", "build", "--target", target, "--directory", str(folder)]
    subprocess.run(command, cwd=source, check=True, capture_output=True)
    (built,) = folder.iterdir()
    return built


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    return build(ROOT, "wheel", tmp_path_factory.mktemp("wheel"))


class Environment:
    """An environment without this project, in an empty place.

    Attributes:
        bin: the folder of its programs.
        place: the working folder of whatever runs in it, and its home.
    """

    def __init__(self, folder: Path) -> None:
        venv.create(folder / "venv", symlinks=True)
        self.bin, self.place = folder / "venv/bin", folder / "home"
        self.place.mkdir()
        others = folder / "others"
        others.mkdir()
        for site in (Path(path) for path in sys.path if Path(path).name == "site-packages"):
            for entry in site.iterdir():
                if not entry.name.startswith(OURS) and not (others / entry.name).exists():
                    (others / entry.name).symlink_to(entry)
        (path,) = folder.glob("venv/lib/python3.*/site-packages")
        (path / "others.pth").write_text(f"{others}\n")

    def run(self, *command: object, status: int = 0) -> str:
        """Standard output of a program of the environment."""
        program, *arguments = map(str, command)
        kept = {name: os.environ[name] for name in ("PATH", "TMPDIR", "LANG") if name in os.environ}
        done = subprocess.run(
            [str(self.bin / program), *arguments], cwd=self.place,
            env={
                **kept, "HOME": str(self.place), "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "",
                "OMP_NUM_THREADS": "1",
            },
            capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == status, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
        return done.stdout

    def pip(self, *words: str) -> str:
        command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(self.bin / "python")]
        done = subprocess.run([*command, *words], capture_output=True, text=True, cwd=self.place)
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def frozen(wheel, tmp_path_factory) -> tuple[Environment, list[str], list[str]]:
    """An environment with the wheel, and what `pip freeze` said before and after."""
    environment = Environment(tmp_path_factory.mktemp("environment"))
    before = environment.pip("freeze", "--all").splitlines()
    environment.pip("install", "--no-index", "--no-deps", str(wheel))
    return environment, before, environment.pip("freeze", "--all").splitlines()


@pytest.fixture(scope="module")
def installed(frozen) -> Environment:
    return frozen[0]


@pytest.mark.slow
def test_install_changes_no_already_installed_package(frozen, wheel):
    _, before, after = frozen
    assert any(line.startswith("megatron-bridge==") for line in before)
    (new,) = set(after) - set(before)
    assert new.startswith("qwen3vl-bridge @ ") and not set(before) - set(after)
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"qwen3vl_bridge", "qwen3vl_recipes"}
    assert "qwen3vl_bridge/py.typed" in names
    modules = {str(path.relative_to(ROOT / "src")) for path in (ROOT / "src").rglob("*.py")}
    modules |= {str(path.relative_to(ROOT / "recipes")) for path in (ROOT / "recipes/qwen3vl_recipes").rglob("*.py")}
    assert {name for name in names if name.endswith(".py")} == modules


def test_installed_program_shows_help(installed):
    assert "usage: qwen3vl" in installed.run("qwen3vl", "--help")
    assert installed.run("qwen3vl", "--version").strip()
    found = installed.run("python", "-c", "import qwen3vl_bridge; print(qwen3vl_bridge.__file__)")
    assert Path(found.strip()).is_relative_to(installed.bin.parent)
    assert '"fits": true' in installed.run("qwen3vl", "plan", "--model", "8B", "--gpus", "8", "--json")


@pytest.mark.slow
def test_installed_import_registers_bridges(installed):
    code = """
import qwen3vl_bridge
from megatron.bridge import AutoBridge
from qwen3vl_bridge.models.qwen3_vl import presets
provider = AutoBridge.from_hf_config(presets.hf_config("8B")).to_megatron_provider(load_weights=False)
print(type(provider).__module__)
"""
    last = installed.run("python", "-W", "ignore", "-c", code).splitlines()[-1]
    assert last.startswith("qwen3vl_bridge.models.qwen3_vl.")


@pytest.mark.slow
def test_installed_doctor_and_recipes_run(installed, untied_folder):
    assert "megatron" in installed.run("qwen3vl", "doctor").lower()
    names = installed.run("qwen3vl", "train", "--list")
    assert "qwen3_vl_8b_sft_config" in names and "qwen35_vl_800m_sft_config" in names
    record = {"messages": [{"role": "user", "content": "Which?"}, {"role": "assistant", "content": "Seven."}]}
    data = installed.place / "train.jsonl"
    data.write_text(f"{json.dumps(record)}\n" * 2)
    words = ["--recipe", "qwen3_vl_digits_sft_config", "--hf-model", untied_folder, "--data-path", data, "--json"]
    assert '"host_while_saving"' in installed.run("qwen3vl", "train", *words, "--dry-run", "--gpu", "H100")


@pytest.mark.slow
def test_installed_convert_import_and_export_restore_weights(installed, untied_folder):
    installed.run("qwen3vl", "convert", "import", "--hf-model", untied_folder, "--megatron-path", "megatron")
    installed.run("qwen3vl", "convert", "export", "--megatron-path", "megatron", "--hf-path", "exported")
    exported = installed.place / "exported/model.safetensors"
    from safetensors import safe_open

    with safe_open(exported, "pt") as found, safe_open(untied_folder / "model.safetensors", "pt") as original:
        assert set(found.keys()) == set(original.keys())
        assert all(found.get_tensor(name).equal(original.get_tensor(name)) for name in original.keys())  # noqa: SIM118
    installed.run("qwen3vl", "convert", "verify", "--hf-model", untied_folder, "--megatron-path", "megatron")


@pytest.mark.slow
def test_installed_data_inspect_runs(installed, untied_folder):
    from qwen3vl_bridge.testing.digits import make_dataset

    make_dataset(installed.place / "data")
    words = ["--hf-model", untied_folder, "--output", "report.html"]
    installed.run("qwen3vl", "data", "inspect", "--data", "data/train.jsonl", *words)
    assert "<html" in (installed.place / "report.html").read_text()


@pytest.fixture(scope="module")
def trained(installed, untied_folder) -> Environment:
    """Rows packed before training, and two runs of two steps: of all weights on these rows, and of adapters."""
    from qwen3vl_bridge.testing.digits import make_dataset

    make_dataset(installed.place / "digits")
    words = ["--data", "digits/train.jsonl", "--hf-model", untied_folder, "--seq-length", "512"]
    installed.run("qwen3vl", "data", "pack", *words, "--output", "rows")
    short = [
        *("train.train_iters=2", "scheduler.lr_warmup_iters=1", "train.global_batch_size=2", "validation.eval_iters=0"),
        *("model.seq_length=512", "dataset.seq_length=512", "dataset.num_workers=0"),
    ]
    given = ["--hf-model", untied_folder, "--data-path", "digits"]
    full = ["--recipe", "qwen3_vl_digits_sft_config", *given, "--save", "run", "dataset.train_packing=rows"]
    installed.run("qwen3vl", "train", *full, *short)
    adapters = ["--recipe", "qwen3_vl_8b_peft_config", *given, "--save", "adapter_run", "peft.dim=4"]
    installed.run("qwen3vl", "train", *adapters, *short)
    return installed


@pytest.mark.slow
def test_installed_training_and_generation_run(trained):
    assert (trained.place / "run/iter_0000002").is_dir()
    assert len((trained.place / "run/metrics.jsonl").read_text().splitlines()) == 2
    image = next((trained.place / "digits/images").iterdir())
    model = ["--hf-model", trained.place / "exported_run", "--max-new-tokens", "2"]
    trained.run("qwen3vl", "convert", "export", "--megatron-path", "run", "--hf-path", "exported_run")
    answer = trained.run("qwen3vl", "generate", *model, "--image", image, "--json", "Which digit is this?")
    assert "answer" in json.loads(answer)


@pytest.mark.slow
def test_installed_adapters_are_exported(trained):
    trained.run("qwen3vl", "adapters", "export", "--megatron-path", "adapter_run", "--hf-path", "adapter")
    assert json.loads((trained.place / "adapter/adapter_config.json").read_text())["r"] == 4


@pytest.mark.slow
def test_source_distribution_builds_the_same_wheel(wheel, tmp_path):
    sdist = build(ROOT, "sdist", tmp_path / "sdist")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path / "source", filter="data")
    (source,) = (tmp_path / "source").iterdir()
    again = build(source, "wheel", tmp_path / "again")
    contents = [zipfile.ZipFile(path) for path in (wheel, again)]
    first, second = ({one.filename: one.CRC for one in archive.infolist()} for archive in contents)
    assert first == second
    tests = {str(path.relative_to(ROOT)) for path in ROOT.glob("tests/**/*.py")}
    assert tests == {str(path.relative_to(source)) for path in source.glob("tests/**/*.py")}
    environment = {**os.environ, "PYTHONPATH": ":".join([f"{source}/src", f"{source}/recipes", str(source)])}
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "tests"]
    done = subprocess.run(command, cwd=source, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]
    shutil.rmtree(source)
