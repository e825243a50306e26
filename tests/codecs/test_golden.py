"""Payloads never change: every codec encodes known arrays to the bytes that it always did."""

import hashlib
import json

import lz4
import pytest
import zstandard

from slipstream.codecs import CODECS
from tests.codecs.golden_arrays import DATA, golden_arrays

FROZEN = json.loads((DATA / "codec_payloads_v1.json").read_text())
LIBRARIES = {"zstd": ".".join(map(str, zstandard.ZSTD_VERSION)), "lz4": lz4.library_version_string()}


@pytest.mark.skipif(FROZEN["libraries"] != LIBRARIES, reason="another zstd or lz4 compresses to other bytes")
def test_every_codec_encodes_known_arrays_to_the_same_bytes_as_ever():
    found = {}
    for array_name, (array, reference) in golden_arrays().items():
        for codec_name, kind in CODECS.items():
            codec = kind()
            if codec.needs_reference:
                codec = codec.against(reference)
            digest = hashlib.blake2b(codec.encode(array), digest_size=8)
            found[f"{codec_name} {array_name}"] = digest.hexdigest()
    assert found == FROZEN["payloads"]
