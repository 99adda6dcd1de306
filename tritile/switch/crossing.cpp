// Kernels at aten's operators that go on to torch's kernel, or to tritile's in Python, without asking Python.
//
// What `tritile.switch.crossing` builds and calls. A thread's switch tells in a tally, which lies in a
// bytearray of Python's, what is asked of calls; see `tritile.switch.tally`, whose layout this is.

#include <Python.h>

#include <ATen/ThreadLocalPythonObjects.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/library.h>

#include <array>
#include <atomic>
#include <exception>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace {

constexpr int kCalls = 5;

enum Asked : int64_t { kNobody = 0, kPython = 1, kPythonUnlessBrief = 2 };

struct Tally {
  std::atomic<int64_t> asked;
  std::atomic<int64_t> brief[kCalls];  // calls that were left at a glance
};
static_assert(sizeof(Tally) == 8 * (1 + kCalls));

struct Limits {
  int64_t rows, elements, bytes;
};

Limits limits;
std::atomic<Tally*> everywhere{nullptr};

// The tally of this thread's switch, or of the one of all threads. Torch keeps the first alive.
Tally* current() {
  static const std::string key = "tritile.switch.tally";
  if (at::impl::ThreadLocalPythonObjects::contains(key)) {
    const auto& kept = at::impl::ThreadLocalPythonObjects::get(key);
    PyObject* object = kept->ptr(&kept->pyinterpreter());
    if (PyByteArray_Check(object)) {
      return reinterpret_cast<Tally*>(PyByteArray_AS_STRING(object));
    }
  }
  return everywhere.load(std::memory_order_acquire);
}

// Whether a graph may be captured: never on the default stream. On another Python asks further.
bool may_capture(const at::Tensor& tensor) {
  if (!tensor.is_cuda()) {
    return false;
  }
  const c10::impl::VirtualGuardImpl guard(c10::DeviceType::CUDA);
  return guard.getStream(tensor.device()).id() != 0;
}

// As `tritile.switch.routes.brief_product`.
bool brief_product(const at::Tensor& a, const at::Tensor& b) {
  return a.dim() >= 2 && a.size(-2) <= limits.rows && b.numel() <= limits.elements && !may_capture(a);
}

// As `tritile.switch.routes.brief_copy`; and copies that keep the order of dimensions, which no switch takes.
bool brief_copy(const at::Tensor& x) {
  return static_cast<int64_t>(x.nbytes()) <= limits.bytes && !may_capture(x);
}

class Crossing final : public c10::OperatorKernel {
 public:
  Crossing(c10::SafeKernelFunction torch, c10::SafeKernelFunction python, int call, int first)
      : torch_(std::move(torch)), python_(std::move(python)), call_(call), first_(first) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
    Tally* tally = current();
    const int64_t asked = tally == nullptr ? kNobody : tally->asked.load(std::memory_order_relaxed);
    if (asked == kNobody) {
      return torch_.callBoxed(op, keys, stack);
    }
    const auto* values = &*(stack->end() - static_cast<std::ptrdiff_t>(op.schema().arguments().size()));
    if (first_ < 0 && keeps_order(values[1])) {
      return torch_.callBoxed(op, keys, stack);
    }
    if (asked == kPythonUnlessBrief && brief(values)) {
      tally->brief[call_].fetch_add(1, std::memory_order_relaxed);
      return torch_.callBoxed(op, keys, stack);
    }
    python_.callBoxed(op, keys, stack);
  }

 private:
  static bool keeps_order(const c10::IValue& form) {
    return form.isNone() || form.toMemoryFormat() == c10::MemoryFormat::Preserve;
  }

  bool brief(const c10::IValue* values) const {
    if (first_ < 0) {
      return brief_copy(values[0].toTensor());
    }
    return brief_product(values[first_].toTensor(), values[first_ + 1].toTensor());
  }

  c10::SafeKernelFunction torch_, python_;
  int call_, first_;  // which counts, and where its factors begin: -1 for a copy
};

struct Operator {
  const char* name;
  const char* overload;
  int call, first;
};

constexpr std::array<Operator, 9> kOperators{{
    {"aten::mm", "", 0, 0},
    {"aten::mm", "out", 0, 0},
    {"aten::bmm", "", 1, 0},
    {"aten::bmm", "out", 1, 0},
    {"aten::addmm", "", 2, 1},
    {"aten::addmm", "out", 2, 1},
    {"aten::baddbmm", "", 3, 1},
    {"aten::baddbmm", "out", 3, 1},
    {"aten::clone", "", 4, -1},
}};

// What stood at a dispatch key before Python's kernels were put there.
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

// That one kernel stands where another stood is what is wanted.
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

// What the last call that gave null failed of.
EXPORTED const char* tritile_failure() {
  return failure.c_str();
}

EXPORTED void tritile_limits(int64_t rows, int64_t elements, int64_t bytes) {
  limits = {rows, elements, bytes};
}

// The switch of all threads: a bytearray, or None. It lives for good, as another thread may be reading it.
EXPORTED void tritile_everywhere(PyObject* tally) {
  Tally* found = nullptr;
  if (tally != Py_None) {
    Py_INCREF(tally);
    found = reinterpret_cast<Tally*>(PyByteArray_AS_STRING(tally));
  }
  everywhere.store(found, std::memory_order_release);
}

// To be called before Python's kernels are registered at the key; null where it fails.
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

// To be called after: the same pointer, null where it fails.
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
          before->kernels[i], kernel_at(op, before->key), op.call, op.first);
      std::string name = std::string(op.name) + (*op.overload ? "." : "") + op.overload;
      before->library->impl(
          name.c_str(), torch::CppFunction::makeFromBoxedFunctor<Crossing>(std::move(kernel)));
    }
    return before;
  });
}

// Takes the kernels away again; what stood there when they came is there.
EXPORTED void tritile_uncross(void* given) {
  delete static_cast<Before*>(given);
}
