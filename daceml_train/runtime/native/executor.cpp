// The C interface of the executor, for ctypes. Every function that can fail returns a status, or a negative number; see
// `failure.h`.

#include <cstring>
#include <exception>
#include <memory>
#include <string>
#include <vector>

#include "compiled_call.h"
#include "failure.h"
#include "fingerprint.h"
#include "identities.h"
#include "leaves.h"
#include "plan.h"
#include "record_functions.h"
#include "stack.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace daceml {
namespace {

// For builders: the number that `body` returns, or -1.
template <class Body>
int build(Body body) {
  int result = -1;
  const int status = guarded([&] { result = body(); }, [] { return -1; });
  return status == ok ? result : -1;
}

Call& building(PlanHandle* handle) {
  TORCH_CHECK_VALUE(handle->call != nullptr, "begin a call before its arguments");
  return *handle->call;
}

template <class T, class From>
int add_list(PlanHandle* handle, const From* items, int count) {
  return build([&] {
    c10::List<T> list;
    for (int i = 0; i < count; ++i) list.push_back(static_cast<T>(items[i]));
    building(handle).add_constant(std::move(list));
    return 0;
  });
}

template <class T>
int add_constant(PlanHandle* handle, T value) {
  return build([&] {
    building(handle).add_constant(c10::IValue(std::move(value)));
    return 0;
  });
}

}  // namespace
}  // namespace daceml

using namespace daceml;

EXPORT int tensors_fingerprint(void* const* tensors, int64_t count, uint64_t* state) {
  return fingerprint(tensors, count, *state);
}
EXPORT void tensor_shares_version(void* tensor, void* owner) { share_version(tensor, owner); }
EXPORT int tensors_attached(void* const* tensors, int64_t count) { return attached(tensors, count); }

// Containers, which of them are lists, how many values each contains; all values, null for any.
EXPORT Identities* identities_create(void* const* containers, const int* lists, const int64_t* counts, int64_t count,
                                     void* const* values, void* const* tensors, int64_t all) {
  auto* made = new Identities;
  for (int64_t i = 0; i < count; ++i) {
    made->containers.push_back({static_cast<_object*>(containers[i]), lists[i] != 0, counts[i]});
  }
  for (int64_t i = 0; i < all; ++i) made->add(static_cast<_object*>(values[i]), tensors[i]);
  return made;
}
EXPORT _object* records_create(_object* classes) { return record_functions(classes); }
EXPORT _object* compiled_call_create(_object* description) { return compiled_call(description); }
EXPORT int compiled_call_programs(_object* function, PlanHandle* forward, PlanHandle* backward, _object* rest) {
  return compiled_call_use(function, &forward->plan, backward == nullptr ? nullptr : &backward->plan, rest);
}
EXPORT int64_t compiled_call_runs(_object* function) { return own<CompiledCall>(PyCFunction_GetSelf(function))->runs; }
EXPORT void compiled_calls_end() { ++epoch(); }
// Whether the backward pass that runs needs the gradient of this input of the autograd node that is at work.
EXPORT int64_t backward_needs(int64_t input) {
  const auto node = torch::autograd::get_current_node();
  return node == nullptr || node->task_should_compute_output(static_cast<size_t>(input));
}
EXPORT int64_t compiled_calls_epoch() { return epoch().load(); }
EXPORT void identities_destroy(Identities* identities) { delete identities; }
EXPORT int identities_hold(const Identities* identities) { return identities->hold(); }

// True if one of the tensors at these positions shares its storage with one of the others.
EXPORT int tensors_shared(void* const* tensors, const int* positions, int64_t count, void* const* others, int64_t all) {
  return shared(tensors, positions, count, others, all);
}

EXPORT const char* executor_error_message() { return failure.message.c_str(); }
EXPORT int executor_error_number() { return failure.number; }
EXPORT _object* executor_error_raised() { return raised(); }
EXPORT const char* executor_dtype_name(int dtype) { return c10::toString(static_cast<c10::ScalarType>(dtype)); }

EXPORT void pool_install() { Pool::instance(); }
EXPORT int pool_gate(int open) { return std::exchange(Pool::gate(), open != 0); }
EXPORT int64_t pool_trim() { return static_cast<int64_t>(Pool::instance().trim()); }
EXPORT void pool_statistics(int64_t* three) {
  const PoolStatistics statistics = Pool::instance().statistics();
  std::memcpy(three, &statistics, sizeof statistics);
}

EXPORT void* arena_create() { return new std::shared_ptr<Arena>(std::make_shared<Arena>()); }
EXPORT void arena_destroy(void* arena) { delete static_cast<std::shared_ptr<Arena>*>(arena); }
EXPORT int64_t arena_capacity(void* handle) {
  Arena& arena = **static_cast<std::shared_ptr<Arena>*>(handle);
  return static_cast<int64_t>(arena.capacity());
}
EXPORT int arena_grow(void* handle, int64_t bytes) {
  Arena& arena = **static_cast<std::shared_ptr<Arena>*>(handle);
  return build([&] {
    const std::lock_guard<Turn> guard(arena.turn);
    arena.grow(static_cast<size_t>(bytes));
    return 0;
  });
}

EXPORT void* plan_create(int slots, void* arena) {
  return new PlanHandle{Plan(slots, *static_cast<std::shared_ptr<Arena>*>(arena)), nullptr};
}
EXPORT void plan_destroy(PlanHandle* handle) { delete handle; }

EXPORT int plan_arena_slot(PlanHandle* handle, int slot, int64_t offset) {
  return build([&] {
    handle->plan.values.declare(slot, Home::arena).offset = offset;
    return 0;
  });
}
EXPORT int plan_input_slot(PlanHandle* handle, int slot, int index, int dtype, const int64_t* sizes, const int64_t* strides,
                           int dimensions, int is_mutable) {
  return build([&] {
    TORCH_CHECK_VALUE(index >= 0, "an input index must not be negative");
    Layout layout(dtype, sizes, strides, dimensions);
    Slot& declared = handle->plan.values.declare(slot, Home::input);
    declared.index = index;
    declared.is_mutable = is_mutable != 0;
    declared.layout = std::move(layout);
    return 0;
  });
}
EXPORT int plan_opaque_slot(PlanHandle* handle, int slot, int index, int dtype, const int64_t* sizes, const int64_t* strides,
                            int dimensions) {
  return build([&] {
    TORCH_CHECK_VALUE(index >= 0, "an input index must not be negative");
    Layout layout(dtype, sizes, strides, dimensions);
    Slot& declared = handle->plan.values.declare(slot, Home::input);
    declared.index = index;
    declared.is_opaque = true;
    declared.layout = std::move(layout);
    return 0;
  });
}
EXPORT int plan_owned_slot(PlanHandle* handle, int slot, int is_fresh, int dtype, const int64_t* sizes,
                           const int64_t* strides, int dimensions) {
  return build([&] {
    Layout layout(dtype, sizes, strides, dimensions);
    Slot& declared = handle->plan.values.declare(slot, is_fresh ? Home::fresh : Home::result);
    declared.layout = std::move(layout);
    declared.offset = -1;
    return 0;
  });
}
EXPORT int plan_offer(PlanHandle* handle, int slot, int64_t offset) {
  return build([&] {
    Slot& offered = handle->plan.values.slot(slot);
    TORCH_CHECK_VALUE(offered.home == Home::result, "slot ", slot, " is no result of a call");
    offered.offset = offset;
    return 0;
  });
}
EXPORT int plan_view(PlanHandle* handle, int slot, int64_t offset, int dtype, const int64_t* sizes, const int64_t* strides,
                     int dimensions) {
  return build([&] { return handle->plan.values.add_view(slot, offset, Layout(dtype, sizes, strides, dimensions)); });
}

EXPORT int plan_kernel(PlanHandle* handle, void* function, const int* slots, const int64_t* offsets, int pointers,
                       const int64_t* integers, int count, int tag) {
  return build([&] {
    TORCH_CHECK_VALUE(function != nullptr, "the kernel's address is null");
    Kernel kernel{reinterpret_cast<KernelFunction>(function), {}, {integers, integers + count}};
    for (int i = 0; i < pointers; ++i) kernel.pointers.push_back({slots[i], offsets[i]});
    return handle->plan.add_kernel(std::move(kernel), tag);
  });
}
EXPORT int plan_product(PlanHandle* handle, int kind, int out, int bias, int a, int b, double beta, double alpha, int tag) {
  return build([&] {
    return handle->plan.add_product({static_cast<Product::Kind>(kind), out, bias, a, b, beta, alpha}, tag);
  });
}
EXPORT int plan_release(PlanHandle* handle, int slot, int tag) {
  return build([&] {
    handle->plan.values.slot(slot);
    return handle->plan.add(Step::release, tag, slot, {});
  });
}
// Target slots and source slots; target offsets, source offsets and bytes.
EXPORT int plan_copies(PlanHandle* handle, const int* slots, const int64_t* numbers, int count, int tag) {
  return build([&] {
    daceml::Copy copy;
    for (int i = 0; i < count; ++i) {
      const int64_t to = numbers[i], from = numbers[count + i], bytes = numbers[2 * count + i];
      TORCH_CHECK_VALUE(to >= 0 && from >= 0 && bytes >= 0, "offsets and bytes must not be negative");
      copy.parts.push_back({{slots[i], to}, {slots[count + i], from}, bytes});
    }
    return handle->plan.add_copy(std::move(copy), tag);
  });
}

EXPORT int plan_control(PlanHandle* handle, int kind, PlanHandle* const* bodies, int body_count, int condition,
                        const int* states, int state_count, const int* slices, const int64_t* strides, int slice_count,
                        const int* shared, int shared_count, const int* results, int result_count, int64_t trips,
                        int reverse, int tag) {
  return build([&] {
    Control control{static_cast<Control::Kind>(kind), {}, condition, {states, states + state_count}, {},
                    {shared, shared + shared_count}, {results, results + result_count}, trips, reverse != 0};
    for (int i = 0; i < body_count; ++i) control.bodies.push_back(&bodies[i]->plan);
    for (int i = 0; i < slice_count; ++i) control.slices.push_back({slices[i], strides[i]});
    return handle->plan.add_control(std::move(control), tag);
  });
}

EXPORT int plan_vary(PlanHandle* handle, PlanHandle* const* samples, const int64_t* rows, int count) {
  return build([&] {
    std::vector<Plan*> plans;
    for (int i = 0; i < count; ++i) plans.push_back(&samples[i]->plan);
    handle->plan.vary(plans, {rows, rows + count});
    return 0;
  });
}
// `numbers`: operands, results, the number of states, reverse; then per kind its count, rows, shared, states, own results,
// children as pairs, written own results, gathers (result, children), what is added as pairs. Each list is preceded by its
// length.
EXPORT int plan_levels(PlanHandle* handle, PlanHandle* const* bodies, int kinds, const int64_t* numbers, int tag) {
  return build([&] {
    const auto one = [&numbers] { return *numbers++; };
    const auto list = [&one] {
      std::vector<int> all(static_cast<size_t>(one()));
      for (int& each : all) each = static_cast<int>(one());
      return all;
    };
    Levels levels;
    levels.operands = list();
    levels.results = list();
    levels.states = static_cast<int>(one());
    levels.reverse = one() != 0;
    for (int kind = 0; kind < kinds; ++kind) {
      Levels::Cell cell;
      cell.body = &bodies[kind]->plan;
      cell.count = one();
      cell.rows = list(), cell.shared = list(), cell.states = list(), cell.own = list();
      const std::vector<int> pairs = list();
      for (size_t i = 0; i + 1 < pairs.size(); i += 2) cell.children.push_back({pairs[i], pairs[i + 1]});
      cell.written = list();
      cell.gather(list());
      const std::vector<int> added = list();
      for (size_t i = 0; i + 1 < added.size(); i += 2) cell.added.push_back({added[i], added[i + 1]});
      levels.cells.push_back(std::move(cell));
    }
    return handle->plan.add_levels(std::move(levels), tag);
  });
}

// Seconds per level of the last levels that this thread ran, `most` of them at most; returns how many there are.
EXPORT int levels_seconds(double* to, int most) {
  const std::vector<double>& seconds = level_seconds();
  std::copy_n(seconds.begin(), std::min(seconds.size(), static_cast<size_t>(most)), to);
  return static_cast<int>(seconds.size());
}

// A stack of so many bytes; null if the system lends none.
EXPORT Stack* stack_create(int64_t bytes) {
  auto stack = std::make_unique<Stack>(bytes);
  return stack->ok() ? stack.release() : nullptr;
}
EXPORT void stack_destroy(Stack* stack) { delete stack; }
EXPORT void* stack_call(Stack* stack, void* (*function)(void*), void* argument) { return stack->call(function, argument); }

EXPORT int call_begin(PlanHandle* handle, const char* name, const char* overload) {
  return build([&] {
    handle->call = std::make_unique<Call>(name, overload);
    return 0;
  });
}
EXPORT int call_none(PlanHandle* handle) {
  return build([&] {
    building(handle).add_constant(c10::IValue());
    return 0;
  });
}
EXPORT int call_tensor(PlanHandle* handle, int view) {
  return build([&] {
    building(handle).add_tensor(view);
    return 0;
  });
}
EXPORT int call_tensors(PlanHandle* handle, const int* views, int count) {
  return build([&] {
    building(handle).add_tensors({views, views + count});
    return 0;
  });
}
EXPORT int call_integer(PlanHandle* handle, int64_t value) { return add_constant(handle, value); }
EXPORT int call_double(PlanHandle* handle, double value) { return add_constant(handle, value); }
EXPORT int call_complex(PlanHandle* handle, double real, double imaginary) {
  return add_constant(handle, c10::complex<double>(real, imaginary));
}
EXPORT int call_boolean(PlanHandle* handle, int value) { return add_constant(handle, value != 0); }
EXPORT int call_string(PlanHandle* handle, const char* value) { return add_constant(handle, std::string(value)); }
EXPORT int call_device(PlanHandle* handle, const char* value) {
  return build([&] {
    building(handle).add_constant(c10::Device(value));
    return 0;
  });
}
EXPORT int call_integers(PlanHandle* handle, const int64_t* items, int count) {
  return add_list<int64_t>(handle, items, count);
}
EXPORT int call_doubles(PlanHandle* handle, const double* items, int count) { return add_list<double>(handle, items, count); }
EXPORT int call_booleans(PlanHandle* handle, const int* items, int count) { return add_list<bool>(handle, items, count); }
EXPORT int call_result(PlanHandle* handle, int slot, int view) {
  return build([&] {
    building(handle).add_result({slot, view});
    return 0;
  });
}
EXPORT int call_end(PlanHandle* handle, int tag) {
  return build([&] {
    building(handle);
    return handle->plan.add_call(std::move(*std::exchange(handle->call, nullptr)), tag);
  });
}

EXPORT int plan_finalize(PlanHandle* handle, int64_t arena_bytes, const int* outputs, int count) {
  return build([&] {
    handle->plan.finalize(arena_bytes, {outputs, outputs + count});
    return 0;
  });
}

EXPORT int plan_threads(PlanHandle* handle, const int* threads, int count) {
  return build([&] {
    const std::lock_guard<Turn> guard(handle->plan.turn);
    handle->plan.use_threads({threads, threads + count});
    return 0;
  });
}

// `numbers`: the number of segments; per segment its lanes; per lane, and then per launch for what it waits for, a list of
// positions after its length.
EXPORT int plan_lanes(PlanHandle* handle, const int* numbers, int launches) {
  return build([&] {
    const std::lock_guard<Turn> guard(handle->plan.turn);
    const auto list = [&numbers] {
      const int count = *numbers++;
      numbers += count;
      return std::vector<int>(numbers - count, numbers);
    };
    std::vector<Lanes::Segment> segments(static_cast<size_t>(*numbers++));
    for (Lanes::Segment& segment : segments) {
      segment.resize(static_cast<size_t>(*numbers++));
      for (std::vector<int>& lane : segment) lane = list();
    }
    std::vector<std::vector<int>> waits(static_cast<size_t>(launches));
    for (std::vector<int>& each : waits) each = list();
    handle->plan.use_lanes(std::move(segments), std::move(waits));
    return 0;
  });
}

EXPORT int plan_run(PlanHandle* handle, void* const* inputs, int64_t count, void** outputs, int profile) {
  return status_of(handle->plan, inputs, static_cast<size_t>(count), outputs, profile != 0);
}

// `plan_run` for a caller that holds the interpreter's lock: a list of the outputs, or the status as a number of Python.
EXPORT _object* plan_call(PlanHandle* handle, void* const* inputs, int64_t count, int profile) {
  std::vector<void*> outputs(handle->plan.outputs());
  void* state = PyEval_SaveThread();
  const int status = plan_run(handle, inputs, count, outputs.data(), profile);
  PyEval_RestoreThread(state);
  if (status != ok) return PyLong_FromLong(status);
  _object* list = PyList_New(static_cast<std::ptrdiff_t>(outputs.size()));
  for (size_t i = 0; i < outputs.size(); ++i) {
    const std::unique_ptr<at::Tensor> owned(static_cast<at::Tensor*>(outputs[i]));
    if (list != nullptr) PyList_SetItem(list, static_cast<std::ptrdiff_t>(i), THPVariable_Wrap(*owned));
  }
  return list;
}

// `begun` may be null.
EXPORT int plan_seconds(PlanHandle* handle, double* seconds, double* begun, int count) {
  return build([&] {
    const std::lock_guard<Turn> guard(handle->plan.turn);
    const auto& measured = handle->plan.seconds();
    TORCH_CHECK_VALUE(count == static_cast<int>(measured.size()), "the plan has ", measured.size(), " launches");
    std::copy(measured.begin(), measured.end(), seconds);
    if (begun != nullptr) std::copy_n(handle->plan.begun().begin(), measured.size(), begun);
    return 0;
  });
}
