// Calls of a compiled graph without Python: the forward program, and a node of autograd that runs the backward program.
// Whatever is not as usual is left to functions of Python's, before anything has run; see `driver.native_call`.
#pragma once

#include <algorithm>
#include <exception>
#include <memory>
#include <string>
#include <vector>

#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/forward_grad.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/saved_variable.h>

#include "compiled_programs.h"
#include "fingerprint.h"
#include "record_functions.h"

namespace daceml {

// The description of a captured graph, which `driver.native_call` makes, and what its calls run.
struct CompiledCall {
  enum Place : int64_t { attribute = -1, seed = -2 };
  struct Input {
    int64_t position;  // among the arguments, or a `Place`
    _object* tensor;   // of an attribute
    bool is_number;    // an integer of Python's, of which the programs take a tensor
  };
  struct Wanted {
    int64_t input, gradient;
  };
  struct Change {
    int64_t input, count;
  };

  _object *python = nullptr, *python_backward = nullptr;
  _object* types[3];       // of tensors, parameters, and integers
  size_t tensor_slot = 0;  // where their objects have the address of the tensor
  std::vector<Input> inputs;
  int64_t results = 0;                            // the first outputs; the others are kept for the backward program
  std::vector<int64_t> returned, differentiable;  // results
  std::vector<int64_t> kept, written;             // inputs
  std::vector<int64_t> cotangents;                // per cotangent of the backward program, its place in `differentiable`
  std::vector<Wanted> wanted;
  std::vector<Change> changes;
  // A variable of a module of Python's, and what it is while autograd is compiled, which knows no node of C++.
  _object *module = nullptr, *variable = nullptr, *compiled_autograd = nullptr;
  std::shared_ptr<const Programs> programs;
  int64_t runs = 0;

  static _object* call(_object* self, _object* const* arguments, std::ptrdiff_t count) {
    auto* op = own<CompiledCall>(self);
    bool ran = false;
    try {
      _object* result = op->natively(self, arguments, count, ran);
      if (ran) return result;
    } catch (const python_error& error) {  // of a hook of saved tensors, or of a launch
      error.raise();
      return nullptr;
    } catch (const std::exception& error) {
      PyErr_SetString(PyExc_RuntimeError, error.what());
      return nullptr;
    }
    return PyObject_Vectorcall(op->python, arguments, count, nullptr);
  }

  void* tensor_of(_object* object) const {
    const bool plain = type_of(object) == types[0] || type_of(object) == types[1];
    return plain ? *reinterpret_cast<void**>(reinterpret_cast<char*>(object) + tensor_slot) : nullptr;
  }

 private:
  // Null, and not `ran`: nothing has, and Python is to run the call.
  _object* natively(_object* self, _object* const* arguments, std::ptrdiff_t count, bool& ran);

  // `numbers` owns the tensors of numbers.
  bool gather(_object* const* arguments, std::ptrdiff_t count, std::vector<void*>& to,
              std::vector<at::Tensor>& numbers) const {
    to.reserve(inputs.size());
    for (const Input& input : inputs) {
      if (input.position == seed) {
        to.push_back(nullptr);
        continue;
      }
      if (input.position >= count) return false;
      if (input.is_number) {
        numbers.push_back(number_of(arguments[input.position]));
        if (!numbers.back().defined()) return false;
        to.push_back(numbers.back().unsafeGetTensorImpl());
        continue;
      }
      void* tensor = tensor_of(input.position < 0 ? input.tensor : arguments[input.position]);
      if (tensor == nullptr || static_cast<c10::TensorImpl*>(tensor)->is_inference()) return false;
      to.push_back(tensor);
    }
    return !writes_shared(to);
  }

  // Undefined for what is no integer of 64 bits.
  at::Tensor number_of(_object* object) const {
    if (type_of(object) != types[2]) return {};
    const int64_t value = PyLong_AsLongLong(object);
    if (value == -1 && PyErr_Occurred() != nullptr) {
      PyErr_Clear();
      return {};
    }
    const at::Tensor tensor = at::empty({}, at::kLong);
    *tensor.mutable_data_ptr<int64_t>() = value;
    return tensor;
  }

  // The bytes of an input's storage, and whether the program writes it.
  struct Memory {
    const char* start;
    const char* stop;
    bool written;
  };

  // Kernels assume that what they write has no alias. Two storages may have the same memory, as from an array of NumPy.
  bool writes_shared(const std::vector<void*>& tensors) const {
    if (written.empty()) return false;
    std::vector<Memory> memories;
    for (void* tensor : tensors) memories.push_back(memory_of(tensor));
    for (int64_t i : written) memories[static_cast<size_t>(i)].written = true;
    std::sort(memories.begin(), memories.end(), [](const Memory& a, const Memory& b) { return a.start < b.start; });
    const char* stop = nullptr;
    bool writes = false;  // one of those that overlap up to `stop` is written
    for (const Memory& each : memories) {
      if (each.start == each.stop) continue;
      if (each.start >= stop) {
        writes = each.written;
      } else if (writes || each.written) {
        return true;
      }
      stop = std::max(stop, each.stop);
    }
    return false;
  }

  // Replaces the inputs by the operands of the forward program; false where what they were computed from has changed.
  bool prepare(const Programs& current, std::vector<void*>& tensors) const {
    if (current.operands.empty()) return true;
    std::vector<void*> watched, operands;
    for (int64_t i : current.watched) watched.push_back(tensors[static_cast<size_t>(i)]);
    uint64_t state = watched.size();
    if (!fingerprint(watched.data(), static_cast<int64_t>(watched.size()), state) || state != current.seen) return false;
    for (const auto& [position, object] : current.operands) {
      operands.push_back(position < 0 ? tensor_of(object) : tensors[static_cast<size_t>(position)]);
    }
    tensors = std::move(operands);
    return true;
  }

  static Memory memory_of(void* tensor) {
    if (tensor == nullptr) return {};
    const auto& impl = *static_cast<c10::TensorImpl*>(tensor);
    if (!impl.has_storage()) return {};
    const auto* start = static_cast<const char*>(impl.unsafe_storage().data());
    return {start, start + impl.unsafe_storage().nbytes(), false};
  }

  bool wants_gradient(const std::vector<void*>& tensors) const {
    return c10::GradMode::is_enabled() && !c10::InferenceMode::is_enabled() && !differentiable.empty() &&
           std::any_of(wanted.begin(), wanted.end(), [&tensors](const Wanted& each) {
             return static_cast<c10::TensorImpl*>(tensors[static_cast<size_t>(each.input)])->requires_grad();
           });
  }

  void connect(_object* self, _object* const* arguments, std::ptrdiff_t count, const std::vector<void*>& tensors,
               const std::vector<at::Tensor>& outputs, std::shared_ptr<const Programs> ran) const;
};

using torch::autograd::variable_list;

struct CompiledGraphBackward : torch::autograd::Node {
  std::shared_ptr<const Programs> programs;
  const CompiledCall* op = nullptr;
  std::shared_ptr<const Given> call;  // owns `op`
  std::vector<torch::autograd::SavedVariable> saved;
  std::vector<int64_t> versions;  // of all inputs
  bool released = false;

  std::string name() const override { return "CompiledGraphBackward"; }

  // Another thread may be in `apply`.
  void release_variables() override {
    std::vector<torch::autograd::SavedVariable> dropped;
    std::shared_ptr<const Given> given;
    const std::lock_guard<std::mutex> lock(mutex_);
    released = true;
    dropped.swap(saved), given.swap(call);
  }

  variable_list apply(variable_list&& cotangents) override {
    variable_list kept;
    std::shared_ptr<const Given> given;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      TORCH_CHECK(!released, "a second backward pass through a compiled graph; the first needs retain_graph=True");
      for (const auto& each : saved) kept.push_back(each.unpack(getptr()));
      given = call;
    }
    variable_list found;
    return natively(cotangents, kept, found) ? found : in_python(cotangents, kept, *given);
  }

 private:
  bool natively(const variable_list& cotangents, const variable_list& kept, variable_list& found) const {
    if (programs->backward == nullptr || c10::GradMode::is_enabled() || !is_usual(*programs)) return false;
    std::vector<void*> inputs;
    for (const at::Tensor& tensor : kept) inputs.push_back(tensor.unsafeGetTensorImpl());
    variable_list dense;
    for (int64_t place : op->cotangents) {
      const at::Tensor& cotangent = cotangents[static_cast<size_t>(place)];
      if (!cotangent.defined() || !is_plain(*cotangent.unsafeGetTensorImpl())) return false;
      const auto strides = cotangent.strides();
      const bool repeats = std::find(strides.begin(), strides.end(), 0) != strides.end();
      dense.push_back(repeats ? cotangent.contiguous() : cotangent);
      inputs.push_back(dense.back().unsafeGetTensorImpl());
    }
    std::vector<at::Tensor> outputs;
    double seconds = 0.0;
    const int status = run(*programs->backward, inputs, programs->backward_outputs, outputs, seconds);
    if (status == mismatch) return false;
    if (status != ok) raise_failure(programs->failed_backward, status);
    for (const CompiledCall::Wanted& each : op->wanted) found.push_back(outputs[static_cast<size_t>(each.gradient)]);
    if (programs->told_backward != nullptr) {
      const Interpreter lock;
      if (!tell(programs->told_backward, seconds)) throw python_error();
    }
    return true;
  }

  // Gradients of gradients, of cotangents that are absent, and whatever else is not as usual.
  variable_list in_python(const variable_list& cotangents, const variable_list& kept, const Given& given) const {
    const Interpreter lock;
    const Owned values(PyTuple_New(static_cast<std::ptrdiff_t>(kept.size())));
    const Owned results(PyTuple_New(static_cast<std::ptrdiff_t>(cotangents.size())));
    const Owned numbers(PyTuple_New(static_cast<std::ptrdiff_t>(versions.size())));
    const Owned needed(PyTuple_New(static_cast<std::ptrdiff_t>(op->wanted.size())));
    const Owned arguments(given.tuple());
    if (!values || !results || !numbers || !needed || !arguments) throw python_error();
    for (size_t i = 0; i < kept.size(); ++i) {
      PyTuple_SetItem(values.get(), static_cast<std::ptrdiff_t>(i), THPVariable_Wrap(kept[i]));
    }
    for (size_t i = 0; i < cotangents.size(); ++i) {
      _object* each = cotangents[i].defined() ? THPVariable_Wrap(cotangents[i]) : new_reference(none());
      PyTuple_SetItem(results.get(), static_cast<std::ptrdiff_t>(i), each);
    }
    for (size_t i = 0; i < versions.size(); ++i) {
      PyTuple_SetItem(numbers.get(), static_cast<std::ptrdiff_t>(i), PyLong_FromLong(versions[i]));
    }
    for (size_t i = 0; i < op->wanted.size(); ++i) {
      PyTuple_SetItem(needed.get(), static_cast<std::ptrdiff_t>(i), PyLong_FromLong(task_should_compute_output(i)));
    }
    _object* all[] = {arguments.get(), numbers.get(), values.get(), results.get(), needed.get()};
    const Owned result(PyObject_Vectorcall(op->python_backward, all, 5, nullptr));
    if (!result) throw python_error();
    variable_list found;
    for (std::ptrdiff_t i = 0; i < PyList_Size(result.get()); ++i) {
      _object* gradient = PyList_GetItem(result.get(), i);
      void* tensor = gradient == none() ? nullptr : op->tensor_of(gradient);
      TORCH_CHECK(tensor != nullptr || gradient == none(), "gradient ", i, " of a compiled graph is not a plain tensor");
      found.push_back(tensor == nullptr ? at::Tensor() : tensor_at(tensor));
    }
    return found;
  }
};

// PyTorch 2.13 counts the references to nodes within them, versions before it beside them.
template <class Pointer, class T>
Pointer counted(T* node) {
  if constexpr (requires { Pointer::unsafe_steal_from_new(node); }) {
    return Pointer::unsafe_steal_from_new(node);
  } else {
    return Pointer(node, [](T* each) { deleteNode(each); });
  }
}

inline void CompiledCall::connect(_object* self, _object* const* arguments, std::ptrdiff_t count,
                                  const std::vector<void*>& tensors, const std::vector<at::Tensor>& outputs,
                                  std::shared_ptr<const Programs> ran) const {
  auto* made = new CompiledGraphBackward;
  const auto node = counted<decltype(torch::autograd::Edge::function)>(made);
  made->programs = std::move(ran);
  made->op = this;
  const auto given = std::make_shared<Given>(self);
  given->arguments.reserve(static_cast<size_t>(count));
  for (std::ptrdiff_t i = 0; i < count; ++i) given->add(arguments[i], tensor_of(arguments[i]));
  made->call = given;
  torch::autograd::edge_list edges;
  for (const Wanted& each : wanted) {
    const at::Tensor tensor = tensor_at(tensors[static_cast<size_t>(each.input)]);
    edges.push_back(tensor.requires_grad() ? torch::autograd::impl::gradient_edge(tensor) : torch::autograd::Edge());
  }
  made->set_next_edges(std::move(edges));
  std::vector<const void*> connected;
  for (int64_t i : differentiable) {
    const at::Tensor& result = outputs[static_cast<size_t>(i)];
    torch::autograd::impl::set_gradient_edge(result, {node, made->add_input_metadata(result)});
    connected.push_back(result.unsafeGetTensorImpl());
  }
  for (int64_t i : kept) made->saved.emplace_back(tensor_at(tensors[static_cast<size_t>(i)]), false);
  for (size_t i = static_cast<size_t>(results); i < outputs.size(); ++i) {
    const bool result = std::count(connected.begin(), connected.end(), outputs[i].unsafeGetTensorImpl()) > 0;
    made->saved.emplace_back(outputs[i], result);
  }
  for (void* tensor : tensors) {
    made->versions.push_back(static_cast<c10::TensorImpl*>(tensor)->version_counter().current_version());
  }
}

inline _object* CompiledCall::natively(_object* self, _object* const* arguments, std::ptrdiff_t count, bool& ran) {
  const std::shared_ptr<const Programs> current = programs;
  std::vector<void*> tensors;
  std::vector<at::Tensor> numbers;
  if (current == nullptr || !is_usual(*current) || PyDict_GetItemWithError(module, variable) == compiled_autograd ||
      torch::autograd::ForwardADLevel::try_get_by_idx(0) != nullptr ||
      !gather(arguments, count, tensors, numbers)) {
    return nullptr;
  }
  std::vector<c10::VariableVersion> counters;
  std::vector<int64_t> versions;
  for (const Change& change : changes) {
    counters.push_back(static_cast<c10::TensorImpl*>(tensors[static_cast<size_t>(change.input)])->version_counter());
    versions.push_back(counters.back().current_version() + change.count);
  }
  if (!prepare(*current, tensors)) return nullptr;
  at::Tensor drawn;
  if (std::any_of(inputs.begin(), inputs.end(), [](const Input& input) { return input.position == seed; })) {
    if (!current->forward->takes(tensors.data())) return nullptr;  // a number that is drawn is used
    drawn = at::empty({}, at::kLong).random_();
    std::replace(tensors.begin(), tensors.end(), static_cast<void*>(nullptr), static_cast<void*>(drawn.unsafeGetTensorImpl()));
  }
  std::vector<at::Tensor> outputs;
  double seconds = 0.0;
  void* state = PyEval_SaveThread();
  const int status = run(*current->forward, tensors, current->forward_outputs, outputs, seconds);
  PyEval_RestoreThread(state);
  if (status == mismatch) return nullptr;
  ran = true;
  ++runs;
  if (status != ok) raise_failure(current->failed_forward, status);
  for (size_t i = 0; i < current->copied.size(); ++i) {
    if (current->copied[i]) outputs[i] = copy_of(outputs[i], *current->copied[i]);
  }
  for (size_t i = 0; i < counters.size(); ++i) counters[i].set_version(versions[i]);
  if (!tell(current->told_forward, seconds)) return nullptr;
  if (!wanted.empty() && wants_gradient(tensors)) connect(self, arguments, count, tensors, outputs, current);
  Owned result(PyTuple_New(static_cast<std::ptrdiff_t>(returned.size())));
  for (size_t i = 0; result && i < returned.size(); ++i) {
    const at::Tensor& output = outputs[static_cast<size_t>(returned[i])];
    PyTuple_SetItem(result.get(), static_cast<std::ptrdiff_t>(i), THPVariable_Wrap(output));
  }
  return result.release();
}

inline std::vector<int64_t> integers_of(_object* tuple) {
  std::vector<int64_t> found;
  for (std::ptrdiff_t i = 0; i < PyTuple_Size(tuple); ++i) found.push_back(number(tuple, i));
  return found;
}

inline std::vector<Output> outputs_from(_object* list) {
  std::vector<Output> found;
  for (_object* each : items(list)) {
    const bool is_view = PyTuple_Size(each) > 1;
    found.push_back({static_cast<size_t>(number(each, 0)), is_view, {}, {}, 0});
    if (!is_view) continue;
    found.back().sizes = integers_of(item(each, 1)), found.back().strides = integers_of(item(each, 2));
    found.back().offset = number(each, 3);
  }
  return found;
}

// A function of Python's that calls a compiled graph; null and no error where PyTorch's tensors are laid out otherwise.
inline _object* compiled_call(_object* description) {
  static Method method{"compiled_graph", CompiledCall::call, FAST, "Calls a compiled graph."};
  auto op = std::make_unique<CompiledCall>();
  std::ptrdiff_t at = 0;
  const auto next = [&] { return item(description, at++); };
  op->python = next(), op->python_backward = next();
  for (_object*& type : op->types) type = next();
  _object* probe = next();
  op->tensor_slot = tensor_slot_of(probe, reinterpret_cast<void*>(PyLong_AsLongLong(next())));
  if (op->tensor_slot == 0) return new_reference(none());
  const std::vector<int64_t> positions = integers_of(next());
  _object* attributes = next();
  for (size_t i = 0; i < positions.size(); ++i) {
    op->inputs.push_back({positions[i], item(attributes, static_cast<std::ptrdiff_t>(i)), false});
  }
  for (int64_t i : integers_of(next())) op->inputs[static_cast<size_t>(i)].is_number = true;
  op->results = PyLong_AsLongLong(next());
  for (auto* list : {&op->returned, &op->differentiable, &op->kept, &op->written, &op->cotangents}) {
    *list = integers_of(next());
  }
  const std::vector<int64_t> wanted = integers_of(next()), changes = integers_of(next());
  for (size_t i = 0; i + 1 < wanted.size(); i += 2) op->wanted.push_back({wanted[i], wanted[i + 1]});
  for (size_t i = 0; i + 1 < changes.size(); i += 2) op->changes.push_back({changes[i], changes[i + 1]});
  op->module = next(), op->variable = next(), op->compiled_autograd = next();
  if (PyErr_Occurred() != nullptr) return nullptr;
  return function_of(&method, std::move(op), {description});
}

// Lets a function of `compiled_call` run these plans, forward and backward, or none; `rest`: see `driver.native_call`.
inline int compiled_call_use(_object* function, Plan* forward, Plan* backward, _object* rest) {
  auto programs = std::make_shared<Programs>();
  programs->alive = new_reference(rest);
  programs->forward = forward, programs->backward = backward;
  programs->forward_outputs = outputs_from(item(rest, 0)), programs->backward_outputs = outputs_from(item(rest, 1));
  const auto told = [rest](std::ptrdiff_t i) { return item(rest, i) == none() ? nullptr : item(rest, i); };
  programs->told_forward = told(2), programs->told_backward = told(3);
  programs->failed_forward = told(4), programs->failed_backward = told(5);
  programs->threads = static_cast<int>(number(rest, 6));
  for (_object* strides : items(item(rest, 8))) {
    programs->copied.emplace_back();
    if (strides != none()) programs->copied.back() = integers_of(strides);
  }
  programs->watched = integers_of(item(rest, 9));
  programs->seen = PyLong_AsUnsignedLongLong(item(rest, 10));
  const std::vector<int64_t> positions = integers_of(item(rest, 11));
  for (size_t i = 0; i < positions.size(); ++i) {
    programs->operands.push_back({positions[i], item(item(rest, 12), static_cast<std::ptrdiff_t>(i))});
  }
  programs->epoch = epoch().load();
  if (PyErr_Occurred() != nullptr) return -1;
  own<CompiledCall>(PyCFunction_GetSelf(function))->programs = std::move(programs);
  return 0;
}

}  // namespace daceml
