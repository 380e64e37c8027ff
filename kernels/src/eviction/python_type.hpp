// SPDX-License-Identifier: Apache-2.0
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "hazard.hpp"

namespace flexkv::eviction {

// The policy behind an object of Python, which owns it; null if the object is none of `hazard`'s type.
Hazard* hazard_of(PyObject* object) noexcept;

}  // namespace flexkv::eviction
