// A call's kernels with every argument except the addresses of its tensors, launched through the driver.
//
// The same as `tritile.runtime.launch.Launch` and `tritile.runtime.native.NativeLaunch`, where the terms are explained,
// on the default stream. `tritile.in_torch.crossing` passes the launches here.

#pragma once

#include <ATen/ATen.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/SmallVector.h>

#include <cstdint>
#include <memory>
#include <vector>

namespace tritile {

constexpr size_t kMaps = 16, kParameters = 160, kBuffers = 32;  // limits of one kernel

struct Driver {
  int (*launch)(const void* config, void* function, void** parameters, void** extra) = nullptr;
  int (*replace)(void* map, void* address) = nullptr;
};
inline Driver driver;

struct alignas(64) Map {  // CUtensorMap
  unsigned char bytes[128];
};

struct Grid {  // CUlaunchConfig
  unsigned grid[3], block[3], shared;
  void* stream;
  void* attributes;
  unsigned count;
};

struct Parameter {
  enum Kind : int64_t { kValue = 0, kBuffer = 1, kMap = 2 };
  int64_t kind, buffer;
  void* address;  // of a value, which stays valid; of a map, until it is copied
};

struct Step {
  void* function;
  Grid grid;
  std::vector<Parameter> parameters;
  std::vector<Map> maps;  // initial values, in the order of their parameters

  bool fire(void* const* buffers) const {
    Map given_maps[kMaps];
    void* pointers[kBuffers];
    void* given[kParameters];
    size_t used = 0;
    for (size_t i = 0; i < parameters.size(); ++i) {
      const Parameter& one = parameters[i];
      given[i] = one.address;
      if (one.kind == Parameter::kBuffer) {
        pointers[one.buffer] = buffers[one.buffer];
        given[i] = &pointers[one.buffer];
      } else if (one.kind == Parameter::kMap) {
        Map& map = given_maps[used];
        map = maps[used++];
        if (driver.replace(&map, buffers[one.buffer]) != 0) {
          return false;
        }
        given[i] = &map;
      }
    }
    return driver.launch(&grid, function, given, nullptr) == 0;
  }
};

using Inputs = c10::SmallVector<const at::Tensor*, 4>;

struct Launch {
  std::vector<int64_t> order;  // buffers as indices of the given tensors, the output being the last
  std::vector<int64_t> sizes, strides;  // of the output
  int64_t bytes = 0;                    // of all workspaces together; `offsets`: the start of each
  std::vector<int64_t> offsets;
  std::vector<int64_t> fixed;  // addresses of buffers that never change
  std::vector<Step> steps;

  // Returns false where the driver refuses a launch, or there is no memory for a workspace.
  bool run(const Inputs& inputs, const at::Tensor& out) const {
    void* buffers[kBuffers];
    size_t count = 0;
    for (const int64_t i : order) {
      const bool last = i == static_cast<int64_t>(inputs.size());
      buffers[count++] = last ? out.mutable_data_ptr() : const_cast<void*>(inputs[i]->const_data_ptr());
    }
    at::Tensor memory;
    if (!offsets.empty()) {
      try {
        memory = at::empty({bytes}, out.options().dtype(at::kByte));
      } catch (const c10::Error&) {
        return false;
      }
      auto* start = static_cast<char*>(memory.mutable_data_ptr());
      for (const int64_t offset : offsets) {
        buffers[count++] = start + offset;
      }
    }
    for (const int64_t address : fixed) {
      buffers[count++] = reinterpret_cast<void*>(address);
    }
    for (const Step& step : steps) {
      if (!step.fire(buffers)) {
        return false;
      }
    }
    return true;
  }
};

// Parses a launch from the words of `Crossing._launch`: order, sizes and strides, each after its count, then those of
// `tritile.runtime.launch.Launch.words`. Returns null where it is too large, or invalid.
class Words {
 public:
  Words(const int64_t* words, int64_t count) : next_(words), end_(words + count) {}

  std::unique_ptr<Launch> launch() {
    auto made = std::make_unique<Launch>();
    made->order = several();
    made->sizes = several();
    made->strides = several();
    made->bytes = one();
    made->offsets = several();
    made->fixed = several();
    const int64_t buffers = made->order.size() + made->offsets.size() + made->fixed.size();
    for (int64_t steps = one(); steps > 0 && fits_; --steps) {
      made->steps.push_back(step(buffers));
    }
    fits_ = fits_ && next_ == end_ && buffers <= static_cast<int64_t>(kBuffers) && !made->steps.empty();
    return fits_ ? std::move(made) : nullptr;
  }

 private:
  int64_t one() {
    fits_ = fits_ && next_ < end_;
    return fits_ ? *next_++ : 0;
  }

  std::vector<int64_t> several() {
    const int64_t count = one();
    fits_ = fits_ && count >= 0 && count <= end_ - next_;
    if (!fits_) {
      return {};
    }
    next_ += count;
    return {next_ - count, next_};
  }

  Step step(int64_t buffers) {
    Step made;
    made.function = reinterpret_cast<void*>(one());
    const auto* grid = reinterpret_cast<const Grid*>(one());
    if (fits_) {
      made.grid = *grid;
      made.grid.stream = nullptr;
    }
    for (int64_t count = one(); count > 0 && fits_; --count) {
      Parameter next{one(), one(), reinterpret_cast<void*>(one())};
      fits_ = fits_ && next.buffer >= 0 && next.buffer < buffers;
      if (fits_ && next.kind == Parameter::kMap) {
        made.maps.push_back(*static_cast<const Map*>(next.address));
      }
      made.parameters.push_back(next);
    }
    fits_ = fits_ && made.parameters.size() <= kParameters && made.maps.size() <= kMaps;
    return made;
  }

  const int64_t *next_, *end_;
  bool fits_ = true;
};

// Tells whether this tensor's device is current, with its default stream, on which nothing can be captured.
inline bool on_default_stream(const at::Tensor& tensor) {
  if (!tensor.is_cuda()) {
    return true;
  }
  const c10::impl::VirtualGuardImpl guard(c10::DeviceType::CUDA);
  return guard.getDevice() == tensor.device() && guard.getStream(tensor.device()).id() == 0;
}

}  // namespace tritile
