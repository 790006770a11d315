// The forward with one of FlashAttention-2's choices undone at a time, in a library of its own, for
// bench/ablation.py.
#include "core/tensors.h"
#include "device/fwd_host.h"
#include "fa2/ablation/split_keys.cuh"
#include "fa2/ablation/two_barriers.cuh"

namespace flash_ext::fa2 {
namespace {

enum Variant { kShipped, kTwoBarriers, kSplitKeys };

template <int kHeadDim>
cudaError_t launch_variant(int variant, const FwdParams& params, int64_t grid,
                           cudaStream_t stream) {
  using Shipped = FwdTraits<__nv_bfloat16, FwdCut<kHeadDim, 128, 64, 2>, false>;
  if (variant == kTwoBarriers) {
    using Traits = TwoBarriers<Shipped>;
    return launch<Traits>(&fwd_kernel<Traits>, params, grid, stream);
  }
  if (variant == kSplitKeys) {
    using Traits = SplitKeys<Shipped>;
    return launch<Traits>(&split_keys_kernel<Traits>, params, grid, stream);
  }
  return launch<Shipped>(&fwd_kernel<Shipped>, params, grid, stream);
}

}  // namespace
}  // namespace flash_ext::fa2

// problem: bfloat16, head_dim 64 or 128. With max_ctas = batch * nheads the grid is not
// sequence-parallel: a CTA has all queries of a head. Returns a cudaError_t.
FLASH_EXT_EXPORT int flash_ext_ablation(int variant, const flash_ext::Problem* problem,
                                        const flash_ext::FwdTensors* tensors, void* stream) {
  using namespace flash_ext;
  device::FwdParams params = device::make_fwd_params(*problem, *tensors, 128);
  int64_t grid = params.scheduler.num_tiles;
  if (problem->max_ctas > 0) {
    grid = problem->max_ctas;
    params.scheduler.lanes_per_group = params.scheduler.lanes;
  }
  const auto launch =
      problem->head_dim == 64 ? &fa2::launch_variant<64> : &fa2::launch_variant<128>;
  return launch(variant, params, grid, static_cast<cudaStream_t>(stream));
}
