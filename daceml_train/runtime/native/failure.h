// What went wrong: a status, and more in thread-local storage, where `executor_error_*` reads it on the same thread.
#pragma once

#include <exception>
#include <mutex>
#include <new>
#include <string>
#include <utility>

#include "plan.h"
#include "python_error.h"

extern "C" {
void PyErr_NormalizeException(_object**, _object**, _object**);
int PyException_SetTraceback(_object*, _object*);
}

// Sets the error of Python for an exception of C++, from libtorch_python.
namespace torch {
void translate_exception_to_python(const std::exception_ptr& error);
}

namespace daceml {

enum Status : int { ok = 0, failed = 1, mismatch = 2, invalid = 3 };

// `number` is the tag of the failed launch, or the index of the refused input.
struct Failure {
  std::string message;
  int number = -1;
  std::exception_ptr cause = nullptr;  // of a run that failed
};
inline thread_local Failure failure;

inline std::string message_of(const c10::Error& error) { return error.what_without_backtrace(); }
inline std::string message_of(const std::exception& error) { return error.what(); }

inline int fail(Status status, std::string message, int number) {
  failure = {std::move(message), number, nullptr};
  return status;
}

// Runs `body`, and turns what it throws into a status. `tag` is read after a failure.
template <class Body, class Tag>
int guarded(Body body, Tag tag) {
  try {
    body();
    return ok;
  } catch (const InputMismatch& error) {
    return fail(mismatch, error.what(), error.index);
  } catch (const c10::ValueError& error) {
    return fail(invalid, message_of(error), tag());
  } catch (const c10::Error& error) {
    return fail(failed, message_of(error), tag());
  } catch (const std::bad_alloc&) {
    return fail(failed, "out of memory", tag());
  } catch (const std::exception& error) {
    return fail(failed, message_of(error), tag());
  } catch (...) {
    return fail(failed, "an exception of unknown type", tag());
  }
}

// Runs a plan, as `Plan::run`, for a caller that does not hold its `turn`.
inline int status_of(Plan& plan, void* const* inputs, size_t count, void** outputs, bool profile) {
  int tag = -1;
  std::exception_ptr cause;
  const int status = guarded(
      [&] {
        const std::lock_guard<Turn> guard(plan.turn);
        try {
          plan.run(inputs, count, outputs, profile);
        } catch (...) {
          tag = plan.current_tag(), cause = std::current_exception();
          throw;
        }
      },
      [&] { return tag; });
  if (status != ok && status != mismatch) failure.cause = std::move(cause);
  return status;
}

// What PyTorch raises in Python for the last run of this thread that failed, which is forgotten; None where that is not
// known. Hold the lock of the interpreter.
inline _object* raised() {
  const std::exception_ptr cause = std::exchange(failure.cause, nullptr);
  _object *type = nullptr, *value = nullptr, *traceback = nullptr;
  if (cause != nullptr) {
    try {
      torch::translate_exception_to_python(cause);
    } catch (...) {  // of a type that is no error
    }
    PyErr_Fetch(&type, &value, &traceback);
    PyErr_NormalizeException(&type, &value, &traceback);
  }
  const Owned of(type), trace(traceback);
  if (value == nullptr) return new_reference(none());
  if (trace) PyException_SetTraceback(value, trace.get());
  return value;
}

}  // namespace daceml
