"""A server of MLflow on a database of SQLite: ``mlflow_server.py DIRECTORY PORT``; port 0 is a free one.

Prints the port once it listens. The application and the store are MLflow's own; its command would start further
processes in which everything is imported again.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from mlflow.server import app
from mlflow.server.constants import ARTIFACT_ROOT_ENV_VAR, ARTIFACTS_DESTINATION_ENV_VAR, BACKEND_STORE_URI_ENV_VAR
from mlflow.server.handlers import initialize_backend_stores
from werkzeug.serving import make_server


def main() -> None:
    """Serve until the process is ended."""
    directory, port = Path(sys.argv[1]), int(sys.argv[2])
    database, artifacts = f"sqlite:///{directory / 'mlflow.db'}", str(directory / "artifacts")
    os.environ[BACKEND_STORE_URI_ENV_VAR] = database
    os.environ[ARTIFACT_ROOT_ENV_VAR] = os.environ[ARTIFACTS_DESTINATION_ENV_VAR] = artifacts
    initialize_backend_stores(database, default_artifact_root=artifacts)
    server = make_server("127.0.0.1", port, app, threaded=True)
    print(f"port {server.server_port}", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
