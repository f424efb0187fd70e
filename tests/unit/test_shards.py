"""Which shard follows, from names alone."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierfs.formats.shards import following_shard


@pytest.mark.parametrize(
    ("name", "following"),
    [
        (b"model-00001-of-00004.safetensors", b"model-00002-of-00004.safetensors"),
        (b"pytorch_model-00002-of-00003.bin", b"pytorch_model-00003-of-00003.bin"),
        (b"Llama-3-70B-Q4_K_M-00001-of-00003.gguf", b"Llama-3-70B-Q4_K_M-00002-of-00003.gguf"),
        (b"model-1-of-12.safetensors", b"model-2-of-12.safetensors"),
        (b"model-9-of-12.safetensors", b"model-10-of-12.safetensors"),
        (b"variables.data-00000-of-00002", b"variables.data-00001-of-00002"),
        (b"model.fp16-00001-of-00002.safetensors", b"model.fp16-00002-of-00002.safetensors"),
        (b"00001-of-00002.bin", b"00002-of-00002.bin"),
        (b"consolidated.00.pth", b"consolidated.01.pth"),
        (b"consolidated.09.pth", b"consolidated.10.pth"),
        (b"layer_0.npz", b"layer_1.npz"),
        (b"layer_9.npz", b"layer_10.npz"),
        (b"layer_099.npz", b"layer_100.npz"),
        (b"part-7.safetensors", b"part-8.safetensors"),
        (b"od\xffd\n-00001-of-00002.bin", b"od\xffd\n-00002-of-00002.bin"),
    ],
)
def test_the_next_of_a_family_follows_if_it_is_there(name: bytes, following: bytes) -> None:
    assert following_shard(name, {name, following, b"config.json"}) == following
    assert following_shard(name, [following, name]) == following
    assert following_shard(name, {name, b"config.json"}) is None


@pytest.mark.parametrize(
    ("name", "neighbour"),
    [
        (b"model-00004-of-00004.safetensors", b"model-00005-of-00004.safetensors"),  # the last one
        (b"model-00001-of-00004.safetensors", b"model-00002-of-00005.safetensors"),  # another set
        (b"model-00001-of-00004.safetensors", b"other-00002-of-00004.safetensors"),
        (b"model-00001-of-00004.safetensors", b"model-00003-of-00004.safetensors"),  # one is missing
        (b"model-Q4_0.gguf", b"model-Q4_1.gguf"),  # the same weights in another quantisation
        (b"adapter_v2.bin", b"adapter_v3.bin"),  # another version
        (b"llama-7b.bin", b"llama-8b.bin"),
        (b"model.safetensors", b"model.safetensors"),
        (b"12345", b"12346"),
        (b"e3b0c44298fc1c149afbf4c8996fb924", b"e3b0c44298fc1c149afbf4c8996fb925"),  # a blob
        (b"", b""),
        (b"-of-", b"-of-"),
        (b"x-999999999999-of-999999999999.bin", b"x-1000000000000-of-999999999999.bin"),
    ],
)
def test_what_is_no_next_shard_does_not_follow(name: bytes, neighbour: bytes) -> None:
    assert following_shard(name, {name, neighbour}) is None


_NAMES = st.one_of(
    st.binary(max_size=255),
    st.from_regex(rb"[a-c]{0,2}[-_.]?[0-9]{1,3}(-of-[0-9]{1,3})?(\.bin|\.pth)?", fullmatch=True),
)


@given(names=st.sets(_NAMES, max_size=60))
def test_going_on_from_shard_to_shard_ends(names: set[bytes]) -> None:
    for name in names:
        seen = {name}
        following = following_shard(name, names)
        while following is not None:
            assert following in names and following not in seen
            seen.add(following)
            following = following_shard(following, names)


def test_a_whole_family_is_walked_in_order() -> None:
    names = {b"model-%05d-of-00120.safetensors" % number for number in range(1, 121)}
    walked = [b"model-00001-of-00120.safetensors"]
    while (following := following_shard(walked[-1], names)) is not None:
        walked.append(following)
    assert walked == sorted(names)


@given(digits=st.integers(0, 10**9 - 1), width=st.integers(1, 9))
def test_a_number_grows_by_one_whatever_its_width(digits: int, width: int) -> None:
    name = b"layer_%0*d.npz" % (width, digits)
    following = b"layer_%0*d.npz" % (width, digits + 1)
    assert following_shard(name, {name, following}) == following
