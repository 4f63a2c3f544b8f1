import torch

from laconic.kernels.cuda import triton_rows as r
from laconic.kernels.cuda import triton_sparse as s


def t(f):
    for _ in range(3):
        f()
    torch.cuda.synchronize()
    best = 1e9
    for _ in range(8):
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record()
        f()
        b.record()
        b.synchronize()
        best = min(best, a.elapsed_time(b))
    return best


n = 355_000_000 // 4096 * 4096
x = torch.randn(n, device="cuda")
y = torch.empty_like(x)
print("copy", t(lambda: y.copy_(x)))
for bits in (4,):
    for block in (128,):
        m = torch.empty(n // block * (1 + block * bits // 16), dtype=torch.int16, device="cuda")
        for num in (2048, 4096, 8192):
            for w in (2, 4, 8):
                rows = num // block
                g = (n // block // rows,)
                e = t(
                    lambda: r.encode_rows[g](
                        x, x, m, n // block, BITS=bits, BLOCK=block, ROWS=rows, PADDED=False, num_warps=w
                    )
                )
                d = t(lambda: r.decode_rows[g](m, y, n // block, BITS=bits, BLOCK=block, ROWS=rows, num_warps=w))
                print("rows", bits, num, w, "%.3f %.3f" % (e, d), flush=True)
k = 123
wid = 4 * k + 185
msg = torch.empty(n // 4096 * wid, dtype=torch.uint8, device="cuda")
sc = torch.empty(2, n // 4096 * 128, dtype=torch.int32, device="cuda")
c = dict(KEPT=k, PADDED=128, CHUNK=4096, PLACE_BITS=12, TWO_BITS=False)
for w in (2, 4, 8, 16):
    e = t(lambda: s.encode_largest[(n // 4096,)](x, sc[0], sc[1], msg, wid, num_warps=w, **c))
    d = t(lambda: s.decode_largest[(n // 4096,)](msg, y, wid, num_warps=w, **c))
    print("topk", w, "%.3f %.3f" % (e, d), flush=True)
