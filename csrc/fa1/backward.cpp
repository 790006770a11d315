// The backward's table of instances.
#include "fa1/backward.h"

#include "fa1/launch.h"
#include "fa1/volta_bwd_cut.h"

namespace flash_ext::fa1 {
namespace {

using namespace device;

template <int kHeadDim, int kBlockM, int kBlockN, bool kModified>
constexpr BwdInstance make_instance() {
  return make_bwd_instance<__half, TuringBwdCut<kHeadDim, kBlockM, kBlockN, kModified>>(
      &launch_bwd<kHeadDim, kBlockM, kBlockN, kModified>);
}

template <int kHeadDim, int kBlockM, int kBlockN, bool kModified>
constexpr BwdInstance make_volta_instance() {
  using Cut = VoltaBwdCut<kHeadDim, kBlockM, kBlockN, kModified>;
  BwdInstance instance =
      make_bwd_instance<__half, Cut>(&launch_volta_bwd<kHeadDim, kBlockM, kBlockN, kModified>);
  instance.parts = Cut::kParts;
  return instance;
}

#define INSTANCE(header, ...) INSTANCE_##header(__VA_ARGS__)
#define INSTANCE_fwd(...)
#define INSTANCE_volta_fwd(...)
#define INSTANCE_bwd(...) make_instance<__VA_ARGS__>(),
#define INSTANCE_volta_bwd(...)
constexpr BwdInstance kInstances[] = {
#include "fa1/instances.inc"
    {},  // a build for 7.0 alone has no other
};
#undef INSTANCE_bwd
#undef INSTANCE_volta_bwd
#define INSTANCE_bwd(...)
#define INSTANCE_volta_bwd(...) make_volta_instance<__VA_ARGS__>(),
constexpr BwdInstance kVoltaInstances[] = {
#include "fa1/instances.inc"
    {},
};
#undef INSTANCE

}  // namespace

const BwdTable kBackward(kInstances), kVoltaBackward(kVoltaInstances);

}  // namespace flash_ext::fa1
