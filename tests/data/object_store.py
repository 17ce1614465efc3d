"""An object store on this machine, in threads of this process."""

import contextlib
import os
import urllib.request
from unittest.mock import patch

import s3fs
from moto.server import ThreadedMotoServer


class Refusals:
    """Stands before a store: `rule` gives the error of a request, or None, which passes it on.

    The rule takes the method, the path and the variables of the request.
    """

    def __init__(self, app):
        self._app, self.rule = app, lambda method, path, env: None

    def __call__(self, env, start_response):
        error = self.rule(env["REQUEST_METHOD"], env["PATH_INFO"], env)
        if error is None:
            return self._app(env, start_response)
        env["wsgi.input"].read(int(env.get("CONTENT_LENGTH") or 0))
        status, code, message = error
        text = f"<Error><Code>{code}</Code><Message>{message}</Message></Error>".encode()
        text = b"" if env["REQUEST_METHOD"] == "HEAD" else text
        start_response(status, [("Content-Length", str(len(text)))])
        return [text]


@contextlib.contextmanager
def object_store(bucket="corpora"):
    """A store with an empty bucket, which `s3://` means here and in child processes.

    Its `refusals` are `Refusals`.
    """
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    url = "http://{}:{}".format(*server.get_host_and_port())
    # Another store of this process has left its buckets to this one.
    urllib.request.urlopen(f"{url}/moto-api/reset", data=b"").close()
    names = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
    variables = {"AWS_ENDPOINT_URL": url, "AWS_DEFAULT_REGION": "us-east-1"}
    with patch.dict(os.environ, variables | dict.fromkeys(names, "x")):
        s3fs.S3FileSystem.clear_instance_cache()
        store = s3fs.S3FileSystem()
        store.mkdir(bucket)
        store.refusals = server._server.app = Refusals(server._server.app)
        try:
            yield store
        finally:
            s3fs.S3FileSystem.clear_instance_cache()
            server.stop()
