"""Devices and NICs by name, so that a topology file need not repeat a data sheet.

Written as in a topology file, which may override every number. The speeds are peaks: what the data
sheet promises for dense matrices, and one way for links. `launch probe` measures.
"""

from typing import Any

CPU = "cpu"  # the kind of a virtual device, whose peak is a guess
FP8 = "float8"  # e4m3fn and e5m2, of which NVIDIA's GPUs since Hopper have products
DTYPES = ("float32", "tf32", "float16", "bfloat16", FP8)


NONE = "-"  # in a row: no products of this dtype


def _row(peaks: str, memory: str, bandwidth: str, fabric: str, link: str) -> dict[str, Any]:
    tflop_per_s = dict(zip(DTYPES, peaks.split(), strict=True))
    latency = "3.5 us" if fabric == "nvlink" else "5 us"
    return {
        "peak_flop_per_s": {
            dtype: f"{peak} TFLOP/s" for dtype, peak in tflop_per_s.items() if peak != NONE
        },
        "memory": memory,
        "memory_bandwidth": bandwidth,
        "link": {"fabric": fabric, "bandwidth": link, "latency": latency},
    }


def _nic(fabric: str, rate: str, latency: str) -> dict[str, str]:
    return {"fabric": fabric, "rate": rate, "latency": latency}


# Memory: a data sheet's GB of HBM are GiB; the driver keeps up to 0.6% of it. A link is what one
# device sends to all others of its node, one way: half of NVLink's "bidirectional" number. MI300X:
# seven xGMI links of 64 GB/s. The latency of NVLink is a step of NCCL's rings (`collective_times`),
# other latencies are a round number.
#
# NVIDIA A100 (nvidia-a100-datasheet-us, 2021), H100 and H200 (their product pages, SXM; halved
# where the page gives "with sparsity"), B200 (Blackwell architecture technical brief, HGX B200 at
# 1,000 W), AMD Instinct MI300X (data sheet, 2023; its fp8 has other codes than NVIDIA's).
# `cpu` is one virtual device of a rehearsal: a guess at one core, shared by all of them.
# Rows stay on one line, so that a column can be read down.
# fmt: off
DATA_SHEETS: dict[str, dict[str, Any]] = {
    # TFLOP/s: float32 tf32 float16 bfloat16 float8  memory     its bandwidth  link, one way
    "a100_40gb": _row("19.5 156 312 312 -",          "40 GiB",  "1.555 TB/s", "nvlink", "300 GB/s"),
    "a100_80gb": _row("19.5 156 312 312 -",          "80 GiB",  "2.039 TB/s", "nvlink", "300 GB/s"),
    "h100":      _row("67 494.5 989 989 1979",       "80 GiB",  "3.35 TB/s",  "nvlink", "450 GB/s"),
    "h200":      _row("67 494.5 989 989 1979",       "141 GiB", "4.8 TB/s",   "nvlink", "450 GB/s"),
    "b200":      _row("80 1100 2250 2250 4500",      "180 GiB", "8 TB/s",     "nvlink", "900 GB/s"),
    "mi300x":    _row("163.4 653.7 1307.4 1307.4 -", "192 GiB", "5.3 TB/s",   "local",  "448 GB/s"),
    "cpu":       _row("0.03 0.03 0.01 0.01 -",       "2 GiB",   "10 GB/s",    "local",  "5 GB/s"),
}
# fmt: on

# Kind -> what JAX says of such a device: its platform, its own name and its compute capability.
AS_JAX_SEES_THEM: dict[str, tuple[str, str, str | None]] = {
    "a100_40gb": ("gpu", "NVIDIA A100", "8.0"),
    "a100_80gb": ("gpu", "NVIDIA A100", "8.0"),
    "h100": ("gpu", "NVIDIA H100", "9.0"),
    "h200": ("gpu", "NVIDIA H200", "9.0"),
    "b200": ("gpu", "NVIDIA B200", "10.0"),
    "mi300x": ("gpu", "AMD Instinct MI300X", None),
    CPU: ("cpu", "cpu", None),
}

# Kind -> the file of configs/calibrations/ that says what it reaches of its data sheet.
CALIBRATIONS = {"a100_40gb": "a100", "a100_80gb": "a100", "h100": "h100", "h200": "h200"}
DEVICES = {
    kind: row | ({"calibration": CALIBRATIONS[kind]} if kind in CALIBRATIONS else {})
    for kind, row in DATA_SHEETS.items()
}

# fmt: off
# Rates are those of the standards. Latencies are of the order seen from process to process: about
# 2 us by RDMA, 30 us by TCP.
NICS: dict[str, dict[str, str]] = {
    "infiniband_100": _nic("infiniband", "100 Gb/s", "2 us"),
    "infiniband_200": _nic("infiniband", "200 Gb/s", "2 us"),
    "infiniband_400": _nic("infiniband", "400 Gb/s", "2 us"),
    "roce_100":       _nic("roce",       "100 Gb/s", "3 us"),
    "roce_200":       _nic("roce",       "200 Gb/s", "3 us"),
    "roce_400":       _nic("roce",       "400 Gb/s", "3 us"),
    "ethernet_10":    _nic("ethernet",   "10 Gb/s",  "30 us"),
    "ethernet_25":    _nic("ethernet",   "25 Gb/s",  "30 us"),
    "ethernet_100":   _nic("ethernet",   "100 Gb/s", "30 us"),
}
# fmt: on

# The rate at which one process sends or receives boundaries over all its connections, on any
# network: 128 MiB over loopback in 41 ms, both ends on 2 cores of an AMD EPYC
# (benchmarks/results/transports_0.10.2.json).
TRANSPORT_BYTES_PER_S = 3.3e9
