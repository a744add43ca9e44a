"""Bandwidth between the multiprocessors of a cluster, next to that of the L2 cache; needs compute capability 9.

Every program holds a tile in shared memory. In one kernel each reads the tiles of the other programs of its cluster, in
the other it reads as many bytes from a buffer that fits the L2 cache. If shared memory of a neighbor is not read faster
than L2, there is nothing to gain from dividing the intermediate z of a wide layer among a cluster.

Writes cluster_bandwidth.csv into the folder of the GPU's records, or into --out. `make trial-gpu`
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from files import write_csv
from gpus import require_on_chip, results_folder

from buttress.ops.measuring import graph_sample_ms
from buttress.ops.on_chip.compiling import machine_code
from buttress.ops.on_chip.launches import Kernel, architecture_of, current_stream

TILE_BYTES, THREADS, ROUNDS, L2_TILES = 128 << 10, 512, 64, 192
SOURCE = """
constexpr int UNITS = TILE_BYTES / 16;

__device__ __forceinline__ uint4 from_neighbor(const uint4* p, unsigned rank) {
  unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(p)), remote;
  uint4 v;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
  asm volatile("ld.shared::cluster.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(remote));
  return v;
}

__device__ __forceinline__ void cluster_barrier() {
  asm volatile("barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;" ::: "memory");
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) read_neighbors(uint4* out) {
  extern __shared__ uint4 tile[];
  for (int i = threadIdx.x; i < UNITS; i += THREADS) tile[i] = uint4{blockIdx.x, unsigned(i), 0, 0};
  cluster_barrier();
  const unsigned rank = blockIdx.x % CLUSTER;
  uint4 sum{};
  for (int round = 0; round < ROUNDS; round++) {
    const unsigned neighbor = (rank + 1 + round % (CLUSTER - 1)) % CLUSTER;
#pragma unroll 8
    for (int i = threadIdx.x; i < UNITS; i += THREADS) {
      uint4 v = from_neighbor(tile + i, neighbor);
      sum.x ^= v.x, sum.y ^= v.y, sum.z ^= v.z, sum.w ^= v.w;
    }
  }
  cluster_barrier();
  out[blockIdx.x * THREADS + threadIdx.x] = sum;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
read_l2(const uint4* __restrict__ in, uint4* out, long long tiles) {
  uint4 sum{};
  for (int round = 0; round < ROUNDS; round++) {
    const uint4* tile = in + (blockIdx.x + round * 37ll) % tiles * UNITS;
#pragma unroll 8
    for (int i = threadIdx.x; i < UNITS; i += THREADS) {
      uint4 v;
      asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(tile + i));
      sum.x ^= v.x, sum.y ^= v.y, sum.z ^= v.z, sum.w ^= v.w;
    }
  }
  out[blockIdx.x * THREADS + threadIdx.x] = sum;
}
"""


def text(cluster: int) -> str:
    """The source for clusters of a size."""
    constants = {"TILE_BYTES": TILE_BYTES, "THREADS": THREADS, "ROUNDS": ROUNDS, "CLUSTER": cluster}
    return "".join(f"constexpr int {name} = {value};\n" for name, value in constants.items()) + SOURCE


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder to write to; by default that of this GPU's records")
    options = parser.parse_args()
    require_on_chip((9, 0))
    device = torch.device("cuda", torch.cuda.current_device())
    torch.cuda.set_stream(torch.cuda.Stream())  # the default stream cannot be captured
    programs, architecture = torch.cuda.get_device_properties(device).multi_processor_count, architecture_of(device)
    rows = []
    for cluster in (2, 4, 8):
        kernel = Kernel(machine_code(text(cluster), architecture), "read_neighbors", TILE_BYTES, device)
        # As many clusters as run at a time: multiprocessors come in groups whose sizes need not be multiples of theirs.
        config = kernel.config(programs // cluster * cluster, THREADS, cluster)
        count = cluster * kernel.kernel.occupancy.max_active_clusters(config, stream=current_stream())
        out = torch.empty(count * THREADS * 4, dtype=torch.int32, device=device)
        ms = graph_sample_ms(lambda: kernel.launch(count, THREADS, out, cluster=cluster), device).ms  # noqa: B023
        rows.append({"reads": f"neighbors in clusters of {cluster}", "programs": count, "ms": round(ms, 4)})
    source = torch.zeros(L2_TILES * TILE_BYTES, dtype=torch.uint8, device=device)
    out = torch.empty(programs * THREADS * 4, dtype=torch.int32, device=device)
    kernel = Kernel(machine_code(text(2), architecture), "read_l2", 0, device)
    ms = graph_sample_ms(lambda: kernel.launch(programs, THREADS, source, out, L2_TILES), device).ms
    rows.append({"reads": "L2 cache", "programs": programs, "ms": round(ms, 4)})
    for row in rows:
        row["TB/s"] = round(float(row["programs"]) * ROUNDS * TILE_BYTES / float(row["ms"]) / 1e9, 2)
        print(row, flush=True)
    write_csv((options.out or results_folder()) / "cluster_bandwidth.csv", rows)


if __name__ == "__main__":
    main()
