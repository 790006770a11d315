// The backward's table of instances.
#include "fa2/backward.h"

#include "fa2/launch.h"

namespace flash_ext::fa2 {
namespace {

using namespace device;

template <typename Element, int kHeadDim, int kBlockM, int kBlockN, int kStages, int kDsStages,
          bool kModified>
constexpr BwdInstance make_instance() {
  return make_bwd_instance<Element,
                           BwdCut<kHeadDim, kBlockM, kBlockN, kStages, kDsStages, kModified>>(
      &launch_bwd<Element, kHeadDim, kBlockM, kBlockN, kStages, kDsStages, kModified>);
}

#define INSTANCE(header, ...) INSTANCE_##header(__VA_ARGS__)
#define INSTANCE_fwd(...)
#define INSTANCE_bwd(...) make_instance<__VA_ARGS__>(),
constexpr BwdInstance kInstances[] = {
#include "fa2/instances.inc"
    {},  // a build of some kernels may have no other
};
#undef INSTANCE

}  // namespace

const BwdTable kBackward(kInstances);

}  // namespace flash_ext::fa2
