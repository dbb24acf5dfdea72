"""Writes GGUF files that lie, for the tests of what refuses them, rewrites the metadata of real ones, and makes models of
other shapes that mean nothing."""

import random
import struct

MAGIC = b"GGUF"
UINT8, INT8, UINT16, INT16, UINT32, INT32, FLOAT32, BOOL, STRING, ARRAY, UINT64, INT64, FLOAT64 = range(13)
SIZES = {UINT8: 1, INT8: 1, UINT16: 2, INT16: 2, UINT32: 4, INT32: 4, FLOAT32: 4, BOOL: 1, UINT64: 8, INT64: 8, FLOAT64: 8}
DEFAULT_ALIGNMENT = 32


def string(text):
    encoded = text if isinstance(text, bytes) else text.encode()
    return struct.pack("<Q", len(encoded)) + encoded


def header(tensors=0, pairs=0, version=3, magic=MAGIC):
    return magic + struct.pack("<IQQ", version, tensors, pairs)


def pair(key, kind, payload):
    return string(key) + struct.pack("<I", kind) + payload


def tensor(name, dimensions, kind=0, offset=0):
    packed = b"".join(struct.pack("<Q", size) for size in dimensions)
    return string(name) + struct.pack("<I", len(dimensions)) + packed + struct.pack("<IQ", kind, offset)


def hostile_files():
    """(name, bytes): files whose headers promise what cannot be."""
    architecture = pair("general.architecture", STRING, string("llama"))
    huge = 1 << 63
    real = tensor("token_embd.weight", [32, 32])
    return {
        "empty": b"",
        "magic-only": MAGIC,
        "wrong-magic": header(magic=b"GGML") + bytes(64),
        "big-endian": MAGIC + struct.pack(">IQQ", 3, 0, 0),
        "version-99": header(version=99) + bytes(64),
        "tensor-count": header(tensors=huge) + bytes(64),
        "pair-count": header(pairs=huge) + bytes(64),
        "array-length": header(pairs=1) + pair("a", ARRAY, struct.pack("<IQ", UINT8, huge)),
        "array-of-arrays": header(pairs=1) + pair("a", ARRAY, struct.pack("<IQ", ARRAY, 4) + bytes(64)),
        "string-length": header(pairs=1) + struct.pack("<Q", huge) + b"x",
        "value-type": header(pairs=1) + pair("a", 77, bytes(64)),
        "alignment-2-31": header(1, 2) + architecture + pair("general.alignment", UINT32, struct.pack("<I", 1 << 31)) + real,
        "alignment-0": header(1, 2) + architecture + pair("general.alignment", UINT32, struct.pack("<I", 0)) + real,
        "architecture-type": header(1, 1) + pair("general.architecture", UINT32, struct.pack("<I", 7)) + real + bytes(8192),
        "dimension-product": header(1, 1) + architecture + tensor("token_embd.weight", [1 << 32, 1 << 32, 1 << 32]) + bytes(64),
        "dimension-count": header(1, 1) + architecture + string("t") + struct.pack("<I", 1 << 30) + bytes(64),
        "outside": header(1, 1) + architecture + tensor("token_embd.weight", [32, 32], offset=1 << 40) + bytes(64),
        "overlap": header(2, 1) + architecture + tensor("a", [1024]) + tensor("b", [1024], offset=32) + bytes(8192),
        "same-name": header(2, 1) + architecture + tensor("a", [8]) + tensor("a", [8], offset=32) + bytes(128),
        "tensor-type": header(1, 1) + architecture + tensor("a", [32], kind=9999) + bytes(256),
        "no-data": header(1, 1) + architecture + real,
    }


def value_end(data, kind, at):
    """Where the value of this kind that begins at `at` ends."""
    if kind in SIZES:
        return at + SIZES[kind]
    if kind == STRING:
        return at + 8 + struct.unpack_from("<Q", data, at)[0]
    item, count = struct.unpack_from("<IQ", data, at)
    at += 12
    if item in SIZES:
        return at + SIZES[item] * count
    for _ in range(count):
        at = value_end(data, item, at)
    return at


def with_chat_template(source, target, template):
    """Copies a real model with another chat template."""
    data = source.read_bytes()
    magic, version, tensors, pairs = struct.unpack_from("<4sIQQ", data)
    assert magic == MAGIC
    at, kept, alignment = 24, b"", DEFAULT_ALIGNMENT
    for _ in range(pairs):
        begin = at
        length = struct.unpack_from("<Q", data, at)[0]
        key = data[at + 8 : at + 8 + length]
        at += 8 + length
        kind = struct.unpack_from("<I", data, at)[0]
        end = value_end(data, kind, at + 4)
        if key == b"general.alignment":
            alignment = struct.unpack_from("<I", data, at + 4)[0]
        if key == b"tokenizer.chat_template":
            kept += pair(key, STRING, string(template))
        else:
            kept += data[begin:end]
        at = end
    infos_begin = at
    for _ in range(tensors):
        at += 8 + struct.unpack_from("<Q", data, at)[0]
        at += 4 + 8 * struct.unpack_from("<I", data, at)[0] + 12
    infos = data[infos_begin:at]
    body = data[-(-at // alignment) * alignment :]
    new = struct.pack("<4sIQQ", magic, version, tensors, pairs) + kept + infos
    new += bytes(-len(new) % alignment)
    target.write_bytes(new + body)
    return target


def split(source, directory, parts):
    """Splits a real model into files as llama.cpp's own tool does and returns their paths: the metadata in the first
    one, the tensors in all of them, and in each its place among the others."""
    data = source.read_bytes()
    _, version, tensors, pairs = struct.unpack_from("<4sIQQ", data)
    at, alignment = 24, DEFAULT_ALIGNMENT
    kept_begin = at
    for _ in range(pairs):
        length = struct.unpack_from("<Q", data, at)[0]
        key = data[at + 8 : at + 8 + length]
        at += 8 + length
        kind = struct.unpack_from("<I", data, at)[0]
        if key == b"general.alignment":
            alignment = struct.unpack_from("<I", data, at + 4)[0]
        at = value_end(data, kind, at + 4)
    kept = data[kept_begin:at]
    infos = []
    for _ in range(tensors):
        length = struct.unpack_from("<Q", data, at)[0]
        name = data[at + 8 : at + 8 + length]
        at += 8 + length
        count = struct.unpack_from("<I", data, at)[0]
        dimensions = struct.unpack_from(f"<{count}Q", data, at + 4)
        at += 4 + 8 * count
        kind, offset = struct.unpack_from("<IQ", data, at)
        at += 12
        infos.append((name, dimensions, kind, offset))
    begin = -(-at // alignment) * alignment
    ends = [info[3] for info in infos[1:]] + [len(data) - begin]
    each = -(-tensors // parts)
    directory.mkdir(parents=True, exist_ok=True)
    paths = []
    for index in range(parts):
        own = list(zip(infos, ends))[index * each : (index + 1) * each]
        numbers = [("split.no", UINT16, "<H", index), ("split.count", UINT16, "<H", parts), ("split.tensors.count", INT32, "<i", tensors)]
        place = b"".join(pair(key, kind, struct.pack(form, value)) for key, kind, form, value in numbers)
        new = header(len(own), (pairs if index == 0 else 0) + len(numbers), version) + (kept if index == 0 else b"") + place
        body = b""
        for (name, dimensions, kind, offset), end in own:
            new += tensor(name, dimensions, kind, len(body))
            body += data[begin + offset : begin + end]
            body += bytes(-len(body) % alignment)
        path = directory / f"{source.stem}-{index + 1:05}-of-{parts:05}.gguf"
        path.write_bytes(new + bytes(-len(new) % alignment) + body)
        paths.append(path)
    return paths


def pairs_of(data):
    """(key, bytes of the whole pair) of a file's metadata."""
    pairs, at = struct.unpack_from("<Q", data, 16)[0], 24
    for _ in range(pairs):
        begin = at
        length = struct.unpack_from("<Q", data, at)[0]
        at += 8 + length
        at = value_end(data, struct.unpack_from("<I", data, at)[0], at + 4)
        yield data[begin + 8 : begin + 8 + length].decode(), data[begin:at]


def llama_tensors(vocabulary, width, layers, heads, key_value_heads, head_width, inner):
    """(name, dimensions, whether it is a norm) of a llama with tied embeddings."""
    yield "token_embd.weight", [width, vocabulary], False
    yield "output_norm.weight", [width], True
    for layer in range(layers):
        for name, dimensions in {
            "attn_norm": [width], "attn_q": [width, heads * head_width], "attn_k": [width, key_value_heads * head_width],
            "attn_v": [width, key_value_heads * head_width], "attn_output": [heads * head_width, width],
            "ffn_norm": [width], "ffn_gate": [width, inner], "ffn_up": [width, inner], "ffn_down": [inner, width],
        }.items():  # fmt: skip
            yield f"blk.{layer}.{name}.weight", dimensions, name.endswith("norm")


def with_random_weights(source, target, context_tokens=4096, **shape):
    """Writes a llama of this shape (see `llama_tensors`) with the tokenizer of a real model and weights drawn from a seed."""
    kept = [(key, pair_bytes) for key, pair_bytes in pairs_of(source.read_bytes()) if key.startswith("tokenizer.")]
    vocabulary = struct.unpack_from("<Q", dict(kept)["tokenizer.ggml.tokens"], 8 + len("tokenizer.ggml.tokens") + 8)[0]
    numbers = {
        "llama.block_count": shape["layers"], "llama.context_length": context_tokens, "llama.embedding_length": shape["width"],
        "llama.feed_forward_length": shape["inner"], "llama.attention.head_count": shape["heads"],
        "llama.attention.head_count_kv": shape["key_value_heads"], "llama.attention.key_length": shape["head_width"],
        "llama.attention.value_length": shape["head_width"], "llama.rope.dimension_count": shape["head_width"],
        "llama.vocab_size": vocabulary, "general.file_type": 1,
    }  # fmt: skip
    written = [pair("general.architecture", STRING, string("llama")), pair("general.name", STRING, string("random"))]
    written += [pair(key, UINT32, struct.pack("<I", number)) for key, number in numbers.items()]
    written.append(pair("llama.attention.layer_norm_rms_epsilon", FLOAT32, struct.pack("<f", 1e-5)))
    written += [pair_bytes for _, pair_bytes in kept]
    draw = random.Random(20)
    drawn = struct.pack("<65521e", *(draw.gauss(0, 0.02) for _ in range(65521)))
    infos, body = [], []
    offset = 0
    for name, dimensions, is_norm in llama_tensors(vocabulary, **shape):
        count = 1
        for size in dimensions:
            count *= size
        # Norms are single precision in every file; the rest half.
        content = struct.pack(f"<{count}f", *[1.0] * count) if is_norm else (drawn * (2 * count // len(drawn) + 1))[: 2 * count]
        infos.append(tensor(name, dimensions, 0 if is_norm else 1, offset))
        body.append(content + bytes(-len(content) % DEFAULT_ALIGNMENT))
        offset += len(body[-1])
    head = header(len(infos), len(written)) + b"".join(written) + b"".join(infos)
    target.write_bytes(head + bytes(-len(head) % DEFAULT_ALIGNMENT) + b"".join(body))
    return target
