"""Tiles of the cast: bandwidth by size and warps."""
import sys
import torch, triton, triton.language as tl
from meshwright.precision.fp8 import cast_triton as c
from meshwright.precision.fp8.turn_triton import turn_tiles

def timed(f):
    for _ in range(3): f()
    torch.cuda.synchronize()
    a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    a.record()
    for _ in range(20): f()
    b.record(); torch.cuda.synchronize()
    return a.elapsed_time(b) / 20

out = open(sys.argv[1], "a")
unit = torch.tensor(2.0**-6, device="cuda")
for M, K in ((8192, 4096), (8192, 14336)):
    x = torch.randn(M, K, device="cuda").bfloat16()
    v = torch.empty(M, K, dtype=torch.uint8, device="cuda"); t = torch.empty(K, M, dtype=torch.uint8, device="cuda")
    largest = torch.empty(1 << 18, device="cuda")
    for rows, columns, warps, notes, order in [(128,128,8,0,0),(128,128,8,1,0),(64,128,4,0,0),(128,64,4,0,0),(64,64,4,0,0),(64,64,2,0,0),(128,128,4,0,0),(64,128,8,0,0),(128,256,8,0,0),(256,64,8,0,0),(128,128,16,0,0),(64,256,8,0,0),(32,128,4,0,0),(128,32,4,0,0)]:
        def f():
            c._cast[(triton.cdiv(M, rows), triton.cdiv(K, columns))](x, unit, v, t, largest, M, K, K, K, M, FORMAT=tl.float8e4nv, BITS=tl.int16, WITHOUT_SIGN=0x7FFF if notes else 0, ROWS=rows, COLUMNS=columns, num_warps=warps)
        ms = timed(f)
        print(f"{M}x{K} tile {rows}x{columns} warps {warps} notes {notes}: {ms:.4f} ms {4 * M * K / ms / 1e9:.2f} TB/s", file=out, flush=True)
    want = (x.float() * 64).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    print("bits equal", torch.equal(v, want), torch.equal(t, want.t()), file=out)
    ms = timed(lambda: turn_tiles(v)); print(f"turn {ms:.4f} ms {2 * M * K / ms / 1e9:.2f} TB/s", file=out, flush=True)
    ms = timed(lambda: v.copy_(v.flip(0)) if False else x.clone()); print(f"clone {ms:.4f} ms {4 * M * K / ms / 1e9:.2f} TB/s", file=out, flush=True)
