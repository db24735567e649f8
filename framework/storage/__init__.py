"""Runs and checkpoints in object storage: ``s3://bucket/run`` and every other URL that fsspec knows.

A run in a bucket is written and read on a local disk, in a cache, by the same code as any other. What changes there is
uploaded behind training, and what others have uploaded is downloaded before it is read.

    cached_url      URLs, and their local directories
    store           eight verbs on the objects below a URL; the library that speaks to the service
    cached_folder   one directory and its objects: what to upload, to download and to delete
    mirror          the thread that uploads
    lease           one machine at a time writes a run
    remote_file     ranges of a file that is not in the cache

The manifest is the last object of a checkpoint that is uploaded and the first one that is deleted. Its other files have
the manifest's checksum in their names, so a checkpoint that is replaced has all its files at any time:

    last.ckpt/manifest.json
    last.ckpt/0123456789abcdef/model-00000.safetensors
"""
