// The C++ dispatch library: kernels at aten's operators that call torch's kernel, or launch tritile's, without Python.
//
// `tritile.in_torch.building` builds it and `tritile.in_torch.crossing` calls it. Python decides about calls that are
// met for the first time, and about those that need care: see `Crossing::operator()`.

#include <Python.h>

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <array>
#include <atomic>
#include <exception>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "known.h"
#include "launch.h"
#include "tally.h"

namespace {

using namespace tritile;

struct Limits {
  int64_t rows, elements, bytes;
};

Limits limits;
std::atomic<Tally*> everywhere{nullptr};
const int64_t* contexts = nullptr;  // the number of open contexts of tritile, which change how calls are made
PyObject* hooks[2] = {nullptr, nullptr};  // Triton's lists of launch hooks
Table table;

// As `tritile.in_torch.routes.brief_product`, for batches.
bool brief_product(const at::Tensor& a, const at::Tensor& b) {
  return a.dim() >= 2 && a.size(-2) <= limits.rows && b.numel() <= limits.elements && on_default_stream(a);
}

// As `tritile.in_torch.routes.brief_copy`. Copies that keep the order of dimensions are brief too: none is handled.
bool brief_copy(const at::Tensor& x) {
  return static_cast<int64_t>(x.nbytes()) <= limits.bytes && on_default_stream(x);
}

// Tells whether Python must launch: a profiler listens, or torch fills what it allocates.
bool wants_python() {
  const at::Context& context = at::globalContext();
  const bool fills = context.deterministicAlgorithms() && context.deterministicFillUninitializedMemory();
  return fills || PyList_GET_SIZE(hooks[0]) || PyList_GET_SIZE(hooks[1]);
}

// Returns the address range from a tensor's first element to the end of its last.
std::pair<uintptr_t, uintptr_t> span_of(const at::Tensor& tensor) {
  const auto start = reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
  int64_t last = 0;
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    last += (tensor.size(dim) - 1) * tensor.stride(dim);
  }
  return {start, start + (last + 1) * tensor.element_size()};
}

bool overlaps(const at::Tensor& one, const at::Tensor& other) {
  const auto [start, end] = span_of(one);
  const auto [first, last] = span_of(other);
  return start < last && first < end;
}

struct Operator {
  const char* name;
  const char* overload;
  int call;   // the slot that counts brief calls
  int first;  // index of the first factor among the arguments: -1 for a copy
  bool batched;

  bool copies() const {
    return first < 0;
  }
};

constexpr std::array<Operator, 9> kOperators{{
    {"aten::mm", "", 0, 0, false},
    {"aten::mm", "out", 0, 0, false},
    {"aten::bmm", "", 1, 0, true},
    {"aten::bmm", "out", 1, 0, true},
    {"aten::addmm", "", 2, 1, false},
    {"aten::addmm", "out", 2, 1, false},
    {"aten::baddbmm", "", 3, 1, true},
    {"aten::baddbmm", "out", 3, 1, true},
    {"aten::clone", "", 4, -1, false},
}};

class Crossing final : public c10::OperatorKernel {
 public:
  Crossing(c10::SafeKernelFunction torch, c10::SafeKernelFunction python, const Operator& op)
      : torch_(std::move(torch)), python_(std::move(python)), op_(op), out_(*op.overload != 0) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
    Tally* tally = tally_here(everywhere);
    const int64_t asked = tally == nullptr ? kNobody : tally->asked.load(std::memory_order_relaxed);
    if (asked == kNobody) {
      return torch_.callBoxed(op, keys, stack);
    }
    const size_t count = op.schema().arguments().size();
    const c10::ArrayRef<c10::IValue> values(&*(stack->end() - static_cast<std::ptrdiff_t>(count)), count);
    if (op_.copies() && keeps_order(values[1])) {
      return torch_.callBoxed(op, keys, stack);
    }
    if (asked == kExpected && brief(values)) {
      tally->count(op_.call);
      return torch_.callBoxed(op, keys, stack);
    }
    Key key;
    if (asked == kPython || *contexts != 0 || !key_of(asked, values, key)) {
      table.drop();  // the pending key belongs to an enclosing call
      return python_.callBoxed(op, keys, stack);
    }
    const auto known = table.find(key);
    if (known == nullptr) {
      const Deciding deciding(std::move(key));
      return python_.callBoxed(op, keys, stack);
    }
    if (known->launch == nullptr) {
      tally->count(known->slot);
      return torch_.callBoxed(op, keys, stack);
    }
    at::Tensor result = launched(*known->launch, values);
    if (!result.defined()) {
      table.drop();
      return python_.callBoxed(op, keys, stack);
    }
    tally->count(known->slot);
    torch::jit::drop(*stack, count);
    stack->emplace_back(std::move(result));
  }

 private:
  struct Deciding {
    explicit Deciding(Key key) {
      table.put_by(std::move(key));
    }
    ~Deciding() {
      table.drop();
    }
  };

  static bool keeps_order(const c10::IValue& form) {
    return form.isNone() || form.toMemoryFormat() == c10::MemoryFormat::Preserve;
  }

  bool brief(c10::ArrayRef<c10::IValue> values) const {
    if (op_.copies()) {
      return brief_copy(values[0].toTensor());
    }
    return op_.batched && brief_product(values[op_.first].toTensor(), values[op_.first + 1].toTensor());
  }

  bool key_of(int64_t asked, c10::ArrayRef<c10::IValue> values, Key& key) const {
    const at::Tensor& last = values[op_.first + 1].toTensor();  // the second factor, or the source of a copy
    if (!on_default_stream(last)) {
      return false;
    }
    const bool fp32 = last.scalar_type() == at::kFloat && !op_.copies();
    const int64_t number = &op_ - kOperators.data();
    key.push_back(number | asked << 8 | (fp32 ? fp32_setting() : 0) << 16);
    for (const c10::IValue& value : values) {
      if (!describe(value, key)) {
        return false;
      }
    }
    return true;
  }

  // Returns the result; undefined where Python must compute it.
  at::Tensor launched(const Launch& launch, c10::ArrayRef<c10::IValue> values) const {
    if (wants_python()) {
      return {};
    }
    Inputs inputs;
    for (int i = 0; i < op_.first + 2; ++i) {
      inputs.push_back(&values[i].toTensor());
    }
    at::Tensor out;
    if (out_) {
      out = values.back().toTensor();
      for (const at::Tensor* input : inputs) {
        if (overlaps(*input, out)) {
          return {};
        }
      }
    } else {
      out = at::empty_strided(launch.sizes, launch.strides, inputs[0]->options());
    }
    return launch.run(inputs, out) ? out : at::Tensor();
  }

  c10::SafeKernelFunction torch_, python_;
  const Operator& op_;
  bool out_;
};

// Holds the kernels at a dispatch key before Python's were registered.
struct Before {
  c10::DispatchKey key;
  std::vector<c10::SafeKernelFunction> kernels;
  std::unique_ptr<torch::Library> library;
};

c10::SafeKernelFunction kernel_at(const Operator& op, c10::DispatchKey key) {
  return c10::Dispatcher::singleton()
      .findSchemaOrThrow(op.name, op.overload)
      .getComputedKernelForDispatchKey(key);
}

// Silences the warning that a kernel replaces another, which is the purpose here.
struct Silence final : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

std::string failure;

template <typename Function>
auto guarded(Function function) -> decltype(function()) {
  try {
    return function();
  } catch (const std::exception& error) {
    failure = error.what();
    return {};
  }
}

}  // namespace

#define EXPORTED extern "C" __attribute__((visibility("default")))

// Returns why the last call that returned null failed.
EXPORTED const char* tritile_failure() {
  return failure.c_str();
}

EXPORTED void tritile_limits(int64_t rows, int64_t elements, int64_t bytes) {
  limits = {rows, elements, bytes};
}

// The arguments of the following three functions are never freed.
//
// Sets the driver's cuLaunchKernelEx and cuTensorMapReplaceAddress.
EXPORTED void tritile_driver(void* launch, void* replace) {
  driver = {reinterpret_cast<decltype(driver.launch)>(launch), reinterpret_cast<decltype(driver.replace)>(replace)};
}

EXPORTED void tritile_contexts(const int64_t* open) {
  contexts = open;
}

EXPORTED void tritile_hooks(PyObject* before, PyObject* after) {
  Py_INCREF(before);
  Py_INCREF(after);
  hooks[0] = before;
  hooks[1] = after;
}

// Sets the tally of the override of all threads: a bytearray, or None. Never freed: another thread may be reading it.
EXPORTED void tritile_everywhere(PyObject* tally) {
  Tally* found = nullptr;
  if (tally != Py_None) {
    Py_INCREF(tally);
    found = reinterpret_cast<Tally*>(PyByteArray_AS_STRING(tally));
  }
  everywhere.store(found, std::memory_order_release);
}

// Call before Python's kernels are registered at the key. Returns null on failure.
EXPORTED void* tritile_before(const char* key) {
  return guarded([&]() -> void* {
    auto before = std::make_unique<Before>();
    before->key = c10::parseDispatchKey(key);
    for (const Operator& op : kOperators) {
      before->kernels.push_back(kernel_at(op, before->key));
    }
    return before.release();
  });
}

// Call after that, with the pointer from `tritile_before`. Returns the same pointer, null on failure.
EXPORTED void* tritile_cross(void* given) {
  return guarded([&]() -> void* {
    auto* before = static_cast<Before*>(given);
    Silence silence;
    c10::WarningUtils::WarningHandlerGuard guard(&silence);
    before->library = std::make_unique<torch::Library>(
        torch::Library::IMPL, "aten", before->key, __FILE__, __LINE__);
    for (size_t i = 0; i < kOperators.size(); ++i) {
      const Operator& op = kOperators[i];
      auto kernel = std::make_unique<Crossing>(
          before->kernels[i], kernel_at(op, before->key), op);
      std::string name = std::string(op.name) + (*op.overload ? "." : "") + op.overload;
      before->library->impl(
          name.c_str(), torch::CppFunction::makeFromBoxedFunctor<Crossing>(std::move(kernel)));
    }
    return before;
  });
}

// Removes the kernels, which uncovers those that were registered before.
EXPORTED void tritile_uncross(void* given) {
  delete static_cast<Before*>(given);
}

// Makes a launch, which is never freed, from words. Returns null where they are invalid.
EXPORTED const void* tritile_launch(const int64_t* words, int64_t count) {
  return guarded([&]() -> const void* { return Words(words, count).launch().release(); });
}

// Tells whether the call that Python is deciding in this thread can be learnt.
EXPORTED bool tritile_waits() {
  return table.waits();
}

// Learns it: calls like it count at this slot and use this launch, or torch's kernel where that is null.
EXPORTED void tritile_learn(int slot, const void* launch) {
  table.learn(slot, static_cast<const Launch*>(launch));
}

EXPORTED void tritile_forget() {
  table.forget();
}

EXPORTED int64_t tritile_known() {
  return static_cast<int64_t>(table.size());
}
