#!/usr/bin/env python3
"""Applies a delta (docs/FORMAT.md, section 3) to the tensors of a safetensors file, forward or back.

    tools/read_delta.py base.safetensors delta out.safetensors [--back]

Written from that page alone, as a check of the page. Slow. Deltas of steps and planes only need the
standard library. Packed planes need `compression.zstd` (Python 3.14) or the package `zstandard`.
Digests are checked if the packages `blake3` and `xxhash` are installed; otherwise it prints which
are missing. Skips the files of a version that are not in the safetensors file.
"""
import json
import struct
import sys

try:
    from blake3 import blake3
except ImportError:
    blake3 = None
try:
    from xxhash import xxh3_128_intdigest
except ImportError:
    xxh3_128_intdigest = None

FRAME = 1 << 20
WIDTHS = {"BF16": 2, "F16": 2, "I16": 2, "U16": 2, "F32": 4, "I32": 4, "U32": 4, "F64": 8, "I64": 8, "U64": 8, "C64": 8}
HALF_BYTES = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}


def refuse(reason):
    sys.exit(f"read_delta: {reason}")


def zstd(data):
    try:
        from compression import zstd as module
    except ImportError:
        try:
            import zstandard
        except ImportError:
            refuse("packed planes need Python 3.14 or the package zstandard")
        return zstandard.ZstdDecompressor().decompressobj().decompress(data)
    return module.decompress(data)


class Reader:
    def __init__(self, data):
        self.data, self.at = data, 0

    def take(self, n):
        if self.at + n > len(self.data):
            refuse("the delta ends early")
        self.at += n
        return self.data[self.at - n : self.at]

    def number(self, n):
        return int.from_bytes(self.take(n), "little")

    def text(self, n):
        return self.take(self.number(n)).decode()

    def leb128(self):
        value = shift = 0
        while True:
            byte = self.number(1)
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value


class Bits:
    def __init__(self, data):
        self.value, self.left = int.from_bytes(data, "little"), 8 * len(data)

    def bits(self, n):
        if n > self.left:
            refuse("a stream of bits is too short")
        value = self.value & ((1 << n) - 1)
        self.value >>= n
        self.left -= n
        return value

    def count(self):
        length = self.bits(5)
        return 0 if length == 0 else (1 << (length - 1)) + self.bits(length - 1)

    def golomb(self, g):
        m = g + 1 if g < 3 else (4 + (g - 3) % 4) << ((g - 3) // 4)
        q = 0
        while q < 24 and self.bits(1):
            q += 1
        if q == 24:
            return self.bits(self.bits(7))
        b = m.bit_length() - 1
        u = (2 << b) - m
        r = self.bits(b)
        if r >= u:
            r = 2 * r + self.bits(1) - u
        return q * m + r

    def finish(self):
        if self.left >= 8 or self.value:
            refuse("a stream of bits is too long")


class Frame:
    def __init__(self, index):
        self.codec = index.number(1)
        self.payload = self.back = self.base = self.result = 0
        if self.codec > 3:
            refuse(f"unknown codec {self.codec}")
        if self.codec:
            self.payload, self.back = index.leb128(), index.leb128()
            self.base, self.result = index.number(16), index.number(16)


def scale(value, width):
    top = 1 << (8 * width - 1)
    return value ^ (top - 1) if value & top else value


def moved(value, step, width):
    return scale((scale(value, width) + step) % (1 << (8 * width)), width)


def weights_of(data, width):
    return list(struct.unpack(f"<{len(data) // width}{'BH_I___Q'[width - 1]}", data))


def bytes_of(weights, width):
    return struct.pack(f"<{len(weights)}{'BH_I___Q'[width - 1]}", *weights)


def steps_of(payload):
    """The first key of each bucket, and the changed weights of each bucket: (rank, step)."""
    bits = Bits(payload)
    starts = [0]
    for _ in range(bits.bits(4)):
        starts.append(starts[-1] + bits.golomb(0) + 1)
    buckets = []
    for _ in starts:
        n = bits.count()
        if n == 0:
            buckets.append([])
            continue
        gaps, kind = bits.bits(6), bits.bits(2)
        sizes = [1] * n
        if kind == 1:
            larger, runs, extra = bits.count(), bits.bits(6), bits.bits(6)
        elif kind == 2:
            sizes_parameter = bits.bits(6)
        ranks, rank = [], -1
        for _ in range(n):
            rank += 1 + bits.golomb(gaps)
            ranks.append(rank)
        if kind == 1:
            at = 0
            for _ in range(larger):
                at += bits.golomb(runs)
                sizes[at] = bits.golomb(extra) + 2
                at += 1
        elif kind == 2:
            sizes = [bits.golomb(sizes_parameter) + 1 for _ in range(n)]
        buckets.append([(rank, -size if bits.bits(1) else size) for rank, size in zip(ranks, sizes)])
    bits.finish()
    return starts, buckets


def crossed(back):
    """For each weight that changed bucket: how many buckets the base's is above the result's."""
    away = {}
    if back:
        bits = Bits(back)
        n, gaps, index = bits.count(), bits.bits(6), -1
        for _ in range(n):
            index += 1 + bits.golomb(gaps)
            distance = bits.golomb(0) + 1
            away[index] = -distance if bits.bits(1) else distance
        bits.finish()
    return away


def by_steps(weights, width, payload, back):
    """`back`: None to go forward, otherwise the data of the reverse section."""
    starts, buckets = steps_of(payload)
    away = crossed(back) if back is not None else {}
    bucket_of = [sum(key >= start for start in starts) - 1 for key in range(256)]
    next_step = [iter(steps) for steps in buckets]
    wanted = [next(steps, None) for steps in next_step]
    seen = [0] * len(starts)
    for i, weight in enumerate(weights):
        key = (weight << 1 >> (8 * width - 8)) & 255
        bucket = bucket_of[key] + away.get(i, 0)
        if wanted[bucket] and wanted[bucket][0] == seen[bucket]:
            step = wanted[bucket][1]
            weights[i] = moved(weight, step if back is None else -step, width)
            wanted[bucket] = next(next_step[bucket], None)
        seen[bucket] += 1
    if any(wanted):
        refuse("a position lies beyond the last weight of its bucket")


def by_planes(weights, width, planes, back):
    n = len(weights)
    if len(planes) != n * width:
        refuse("the planes have another size than the frame")
    for i, weight in enumerate(weights):
        coded = sum(planes[b * n + i] << (8 * b) for b in range(width))
        step = coded >> 1 ^ -(coded & 1)
        weights[i] = moved(weight, -step if back is not None else step, width)


def check_frame(data, expected):
    if xxh3_128_intdigest and xxh3_128_intdigest(data) != expected:
        refuse("a frame has another digest than the delta says")


def apply_frame(frame, data, width, payload, back):
    if frame.codec == 0:
        return data
    check_frame(data, frame.base if back is None else frame.result)
    weights = weights_of(data, width)
    if frame.codec == 3:
        by_steps(weights, width, payload, back)
    else:
        by_planes(weights, width, zstd(payload) if frame.codec == 2 else payload, back)
    data = bytes_of(weights, width)
    check_frame(data, frame.result if back is None else frame.base)
    return data


def size_of(dtype, shape):
    n = 1
    for dimension in shape:
        n *= dimension
    return n * HALF_BYTES[dtype] // 8 if dtype in HALF_BYTES else n * WIDTHS.get(dtype, 1)


def apply(tensors, delta, back):
    """Changes `tensors`, from name to (dtype, shape, bytes), into the other version."""
    reader = Reader(delta)
    if reader.take(8) != b"SPTDELTA" or reader.number(4) != 2 or reader.number(4) != 0:
        refuse("not a delta of format version 2")
    reader.take(64)
    index_bytes, payload_bytes, back_bytes = reader.number(8), reader.number(8), reader.number(8)
    checksum = reader.take(32)
    raw = reader.take(index_bytes)
    if blake3 and blake3(delta[:104] + raw).digest() != checksum:
        refuse("the checksum of the index does not match")
    index, payloads, backs = Reader(raw), Reader(reader.take(payload_bytes)), Reader(delta[reader.at :])
    if len(backs.data) not in (0, back_bytes) or (back and len(backs.data) != back_bytes):
        refuse("the delta ends early")
    for _ in range(index.number(4)):
        name, change = index.text(2), index.number(1)
        if back and change != 1:
            refuse("the delta cannot be applied in reverse")
        if change == 0:
            del tensors[name]
            continue
        dtype, shape = index.text(1), [index.number(8) for _ in range(index.number(1))]
        digests = [index.take(32) for _ in range(2 if change == 1 else 1)]
        size, width = size_of(dtype, shape), WIDTHS.get(dtype, 1)
        data = tensors[name][2] if change == 1 else bytes(size)
        if len(data) != size:
            refuse(f"{name}: the base has another size")
        made = []
        for start in range(0, size, FRAME * width):
            frame = Frame(index)
            payload, extra = payloads.take(frame.payload), backs.take(frame.back) if back else None
            made.append(apply_frame(frame, data[start : start + FRAME * width], width, payload, extra))
        data = b"".join(made)
        if blake3 and blake3(data).digest() != digests[0 if back else -1]:
            refuse(f"{name}: its bytes have another digest than the delta says")
        tensors[name] = (dtype, shape, data)
    if back and index.number(4):
        refuse("the delta cannot be applied in reverse")


def read_safetensors(path):
    with open(path, "rb") as file:
        data = file.read()
    length = int.from_bytes(data[:8], "little")
    header, body = json.loads(data[8 : 8 + length]), data[8 + length :]
    header.pop("__metadata__", None)
    return {name: (t["dtype"], t["shape"], body[slice(*t["data_offsets"])]) for name, t in header.items()}


def write_safetensors(path, tensors):
    header, offset = {}, 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, _, data in tensors.values():
            file.write(data)


def main():
    arguments = [argument for argument in sys.argv[1:] if argument != "--back"]
    if len(arguments) != 3:
        sys.exit(__doc__)
    base, delta, out = arguments
    tensors = read_safetensors(base)
    with open(delta, "rb") as file:
        apply(tensors, file.read(), "--back" in sys.argv)
    write_safetensors(out, tensors)
    missing = [name for name, module in (("blake3", blake3), ("xxhash", xxh3_128_intdigest)) if module is None]
    print("digests checked" if not missing else f"not checked, no package: {', '.join(missing)}")


main()
