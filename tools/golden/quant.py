"""Quantized matrices by torch and compressed-tensors, the reference for `artifact::quant`.

Run by tools/golden.sh. Writes policy/artifact/tests/golden/quantised.json: matrices with their codes
and scales, as the hexadecimal bytes of a checkpoint. torch rounds to float8_e4m3fn. compressed-tensors
chooses the bf16 scales of int4 and the scales of nvfp4, rounds and packs. Blocks whose largest magnitude is below 2^-100 are
left out: our specs give them scale 1, the libraries other scales.
"""
import json
import sys

import torch
from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import quantize
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

INT4 = QuantizationArgs(num_bits=4, type="int", symmetric=True, strategy="group", group_size=32)

NVFP4 = QuantizationArgs(
    num_bits=4, type="float", symmetric=True, strategy="tensor_group", group_size=16, scale_dtype=torch.float8_e4m3fn
)


def fp8(weights):
    rows, columns = weights.shape
    codes = torch.zeros(rows, columns, dtype=torch.float8_e4m3fn)
    scales = torch.zeros(-(-rows // 128), -(-columns // 128))
    for i in range(0, rows, 128):
        for j in range(0, columns, 128):
            block = weights[i : i + 128, j : j + 128].float()
            scale = block.abs().max() / torch.tensor(448.0)
            scales[i // 128, j // 128] = scale
            codes[i : i + 128, j : j + 128] = (block / scale).to(torch.float8_e4m3fn)
    return codes, scales


def int4(weights):
    groups = weights.unflatten(1, (-1, 32)).float()
    scales, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), INT4)
    scales = scales.to(torch.bfloat16)
    codes = quantize(weights.float(), scales.float(), torch.zeros_like(scales, dtype=torch.int8), INT4, dtype=torch.int8)
    return pack_to_int32(codes, 4), scales


def nvfp4(weights):
    weights = weights.float()
    common = generate_gparam(weights.amin(), weights.amax())
    groups = weights.unflatten(1, (-1, 16))
    scales, zeros = calculate_qparams(groups.amin(-1), groups.amax(-1), NVFP4, global_scale=common)
    codes = quantize(weights, scales, zeros, NVFP4, global_scale=common)
    return pack_fp4_to_uint8(codes), scales.to(torch.float8_e4m3fn)


def matrix(rows, columns, dtype, seed):
    torch.manual_seed(seed)
    weights = torch.randn(rows, columns) * 10 ** torch.empty(rows, 1).uniform_(-4, 2)
    flat = weights.view(-1)
    # far apart, equal magnitudes of both signs, zeros of both signs
    flat[3] = 3e4
    flat[40], flat[41] = 2.0, -2.0
    flat[60], flat[61] = 0.0, -0.0
    flat[70] = 1e-30
    return weights.to(dtype)


def text(tensor):
    return tensor.contiguous().view(torch.uint8).numpy().tobytes().hex()


def main(path):
    cases = []
    dtypes = {"BF16": torch.bfloat16, "F32": torch.float32}
    for seed, (rows, columns, dtype) in enumerate([(5, 96, "BF16"), (3, 160, "F32"), (131, 32, "BF16"), (2, 256, "BF16"), (4, 64, "F32")]):
        weights = matrix(rows, columns, dtypes[dtype], seed)
        case = {"dtype": dtype, "rows": rows, "columns": columns, "weights": text(weights)}
        for spec, make in [("fp8-e4m3-b128.1", fp8), ("int4-sym-g32.1", int4), ("nvfp4-e4m3-g16.1", nvfp4)]:
            codes, scales = make(weights)
            case[spec] = {"codes": text(codes), "scales": text(scales)}
        cases.append(case)
    with open(path, "w") as file:
        json.dump(cases, file, indent=0)
        file.write("\n")


if __name__ == "__main__":
    main(sys.argv[1])
