"""An object store on this machine, in threads of this process."""

import contextlib
import os
import urllib.request
from unittest.mock import patch

import s3fs
from moto.server import ThreadedMotoServer


@contextlib.contextmanager
def object_store(bucket="corpora"):
    """A store with an empty bucket, which `s3://` means here and in child processes."""
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
        try:
            yield store
        finally:
            s3fs.S3FileSystem.clear_instance_cache()
            server.stop()
