"""What the package says of itself, and which extra it names where a package is missing."""

import shutil
import subprocess
import sys
from email.parser import HeaderParser
from pathlib import Path

from helpers.cases import case
from helpers.command import python

ROOT = Path(__file__).parents[1]

HIDDEN = """
import sys


class Hide:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == {name!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)


sys.meta_path.insert(0, Hide)
try:
    import thinwire.integrations.{name}
except ModuleNotFoundError as error:
    assert error.name == {name!r}, error.name
    print(error)
"""


def test_the_licence_is_an_expression_and_its_text_and_those_of_the_compiled_libraries_are_files(tmp_path):
    for name in ("pyproject.toml", "README.md", "LICENSE", "CMakeLists.txt"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "native").mkdir()
    shutil.copy(ROOT / "native/LICENSES.txt", tmp_path / "native")
    (tmp_path / "src/thinwire").mkdir(parents=True)
    shutil.copy(ROOT / "src/thinwire/__init__.py", tmp_path / "src/thinwire")
    build = "from scikit_build_core.build import prepare_metadata_for_build_wheel as build; build('metadata')"
    subprocess.run([sys.executable, "-c", build], cwd=tmp_path, check=True, capture_output=True)
    (folder,) = (tmp_path / "metadata").iterdir()
    metadata = HeaderParser().parsestr((folder / "METADATA").read_text(encoding="utf-8"))
    assert metadata.get_all("License-Expression") == ["Apache-2.0"] and metadata["License"] is None
    texts = metadata.get_all("License-File")
    assert texts == ["LICENSE", "native/LICENSES.txt"] and all((folder / "licenses" / text).is_file() for text in texts)


def test_a_missing_package_of_a_trainer_is_told_with_its_extra(tmp_path):
    for name in ("accelerate", "lightning", "transformers"):
        with case(name):
            done = python("-c", HIDDEN.format(name=name), cwd=tmp_path)
            assert done.returncode == 0, done.stderr
            assert f"needs {name}, which is not installed" in done.stdout and "pip install '.[trainers]'" in done.stdout
