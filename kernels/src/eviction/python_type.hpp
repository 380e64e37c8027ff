// SPDX-License-Identifier: Apache-2.0
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "hazard.hpp"

namespace flexkv::eviction {

// Whether an object of Python is a policy of this type.
bool is_hazard(PyObject* object) noexcept;

// The policy behind an object of Python, which outlives the loan, for an index that has the keys: the
// objects that keys come with are its own, and `bytes_of` gives their bytes. Until the loan ends, which
// forgets all blocks, Python's calls about blocks raise.
class HazardLoan {
 public:
  // Throws PythonError if the policy is lent already or has blocks.
  HazardLoan(PyObject* policy, BlockTable::BytesOf bytes_of);
  ~HazardLoan();
  HazardLoan(const HazardLoan&) = delete;
  HazardLoan& operator=(const HazardLoan&) = delete;

  Hazard* operator->() const noexcept { return hazard_; }

 private:
  PyObject* policy_;
  Hazard* hazard_;
};

}  // namespace flexkv::eviction
