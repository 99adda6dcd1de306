// The table of decided calls: the key of each kind of call, and its verdict.
//
// A call that is not in the table goes to Python, its key pending. Python sets the verdict for that
// key once it has decided.

#pragma once

#include <ATen/ATen.h>
#include <ATen/Context.h>
#include <ATen/core/ivalue.h>
#include <c10/util/SmallVector.h>

#include <cstring>
#include <memory>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <unordered_map>
#include <utility>

#include "launch.h"

namespace tritile {

using Key = c10::SmallVector<int64_t, 48>;

inline size_t hash_of(const Key& key) {
  uint64_t hash = key.size();
  for (const int64_t word : key) {
    hash = (hash ^ static_cast<uint64_t>(word)) * 0x9E3779B97F4A7C15u;
    hash ^= hash >> 29;
  }
  return hash;
}

// As `tritile.in_torch.routes._key_of`. Returns false for a tensor without dense memory, such as one whose storage was
// resized to nothing, or whose class has a __torch_dispatch__.
inline bool describe(const at::Tensor& tensor, Key& key) {
  if (!tensor.defined() || tensor.layout() != at::kStrided || !tensor.has_storage() ||
      tensor.key_set().has(c10::DispatchKey::Python) || !tensor.unsafeGetTensorImpl()->storage_initialized()) {
    return false;
  }
  const auto address = reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
  key.push_back(
      static_cast<int64_t>(tensor.scalar_type()) | static_cast<int64_t>(tensor.device().type()) << 8 |
      static_cast<int64_t>(tensor.is_neg()) << 16 | static_cast<int64_t>(tensor.is_conj()) << 17 |
      static_cast<int64_t>(address % 16) << 20 | static_cast<int64_t>(tensor.dim()) << 24 |
      static_cast<int64_t>(tensor.device().index() + 1) << 32);
  key.append(tensor.sizes().begin(), tensor.sizes().end());
  key.append(tensor.strides().begin(), tensor.strides().end());
  return true;
}

// Returns false for anything but a tensor, an integer, a floating-point number or a memory format.
inline bool describe(const c10::IValue& value, Key& key) {
  if (value.isTensor()) {
    return describe(value.toTensor(), key);
  }
  if (value.isDouble()) {
    int64_t bits;
    const double number = value.toDouble();
    std::memcpy(&bits, &number, sizeof bits);
    key.append({1, bits});
  } else if (value.isInt()) {  // also memory formats
    key.append({2, value.toInt()});
  } else {
    return false;
  }
  return true;
}

// What torch is set to for products of float32; none where nobody set it.
inline int64_t fp32_setting() {
  return static_cast<int64_t>(
      at::globalContext().float32Precision(at::Float32Backend::CUDA, at::Float32Op::MATMUL));
}

struct Known {
  Key key;
  int slot;
  const Launch* launch;  // never freed; null where calls are passed through to torch's kernel
};

class Table {
 public:
  std::shared_ptr<const Known> find(const Key& key) const {
    const std::shared_lock lock(mutex_);
    const auto [first, last] = found_.equal_range(hash_of(key));
    for (auto one = first; one != last; ++one) {
      if (one->second->key == key) {
        return one->second;
      }
    }
    return nullptr;
  }

  // A key that is pending when the table is cleared is not learnt afterwards.
  void put_by(Key key) {
    pending() = Pending{epoch(), std::move(key)};
  }

  void drop() {
    pending().reset();
  }

  bool waits() const {
    return pending().has_value();
  }

  // Sets the verdict of the call that Python is deciding in this thread, if its key is pending.
  void learn(int slot, const Launch* launch) {
    if (!pending()) {
      return;
    }
    auto known = std::make_shared<const Known>(Known{std::move(pending()->key), slot, launch});
    const uint64_t then = pending()->epoch;
    pending().reset();
    const std::unique_lock lock(mutex_);
    if (then == epoch_ && found_.size() < kMost) {
      found_.emplace(hash_of(known->key), std::move(known));
    }
  }

  void forget() {
    const std::unique_lock lock(mutex_);
    ++epoch_;
    found_.clear();
  }

  size_t size() const {
    const std::shared_lock lock(mutex_);
    return found_.size();
  }

 private:
  struct Pending {
    uint64_t epoch;
    Key key;
  };

  static constexpr size_t kMost = 1 << 16;

  static std::optional<Pending>& pending() {
    thread_local std::optional<Pending> put_by;
    return put_by;
  }

  uint64_t epoch() const {
    const std::shared_lock lock(mutex_);
    return epoch_;
  }

  mutable std::shared_mutex mutex_;
  std::unordered_multimap<size_t, std::shared_ptr<const Known>> found_;
  uint64_t epoch_ = 0;
};

}  // namespace tritile
