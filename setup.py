"""Keep what setuptools writes while it builds out of the clone; pyproject.toml has everything else."""

from __future__ import annotations

import atexit
import shutil
import tempfile

import setuptools

folder = tempfile.mkdtemp(prefix="phalanx-build-")
atexit.register(shutil.rmtree, folder, ignore_errors=True)
setuptools.setup(
    # The root of the clone is the package: without its name, this script would be installed as phalanx/setup.py.
    script_name="setup.py",
    options={"build": {"build_base": folder}, "egg_info": {"egg_base": folder}},
)
