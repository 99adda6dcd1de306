// What an override asks of calls, and its counts, in the layout of `tritile.in_torch.tally`.

#pragma once

#include <Python.h>

#include <ATen/ThreadLocalPythonObjects.h>

#include <atomic>
#include <cstdint>
#include <string>

namespace tritile {

constexpr int kCalls = 5;  // the first slots, which count brief calls
constexpr int kSlots = 4096;

enum Asked : int64_t { kNobody = 0, kPython = 1, kExpected = 2, kAlways = 3 };

struct Tally {
  std::atomic<int64_t> asked;
  std::atomic<int64_t> calls[kSlots];

  void count(int slot) {
    calls[slot].fetch_add(1, std::memory_order_relaxed);
  }
};
static_assert(sizeof(Tally) == 8 * (1 + kSlots));

// Returns the tally of this thread's override, which torch keeps alive, else that of the override of all threads.
inline Tally* tally_here(const std::atomic<Tally*>& everywhere) {
  static const std::string key = "tritile.in_torch.tally";
  if (at::impl::ThreadLocalPythonObjects::contains(key)) {
    const auto& kept = at::impl::ThreadLocalPythonObjects::get(key);
    PyObject* object = kept->ptr(&kept->pyinterpreter());
    if (PyByteArray_Check(object)) {
      return reinterpret_cast<Tally*>(PyByteArray_AS_STRING(object));
    }
  }
  return everywhere.load(std::memory_order_acquire);
}

}  // namespace tritile
