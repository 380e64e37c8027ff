// SPDX-License-Identifier: Apache-2.0
#include <memory>

#include "object.hpp"
#include "policy.hpp"

namespace flexkv::index {

namespace {

class PythonPolicy final : public Policy {
 public:
  PythonPolicy(PyObject* policy, const BlockTable& table)
      : table_(table),
        began_(method(policy, "began")),
        ended_(method(policy, "ended")),
        inserted_(method(policy, "inserted")),
        hit_(method(policy, "hit")),
        touched_(method(policy, "touched")),
        held_(method(policy, "held")),
        released_(method(policy, "released")),
        evicted_(method(policy, "evicted")),
        victim_(method(policy, "victim")),
        clear_(method(policy, "clear")) {}

  void began(PyObject* keys, PyObject* ready, PyObject* context, PyObject* now) override {
    call(began_, keys, ready, context, now);
  }

  void ended(PyObject* request_id, PyObject* output_tokens, PyObject* now) override {
    call(ended_, request_id, output_tokens, now);
  }

  void inserted(Block* block) override {
    call(inserted_, block->key, block->parent == nullptr ? Py_None : block->parent->key);
  }

  void hit(Block* block, PyObject* context) override {
    call(hit_, block->key, use_of(block).get(), context);
  }

  void touched(Block* block) override { call(touched_, block->key, use_of(block).get()); }

  void held(Block* block) override { call(held_, block->key); }

  void released(Block* block) override { call(released_, block->key, use_of(block).get()); }

  void evicted(Block* block) override { call(evicted_, block->key); }

  Block* victim(PyObject* newcomer) override {
    const Reference key = newcomer == nullptr ? call(victim_) : call(victim_, newcomer);
    if (key.get() == Py_None) {
      return nullptr;
    }
    Block* const block = table_.find(key.get());
    if (block == nullptr || !block->evictable()) {
      PyErr_SetObject(PyExc_KeyError, key.get());
      throw PythonError{};
    }
    return block;
  }

  void clear() override { call(clear_); }

  bool follows_requests() const noexcept override { return true; }

 private:
  static Reference method(PyObject* policy, const char* name) {
    return own(PyObject_GetAttrString(policy, name));
  }

  static Reference use_of(const Block* block) { return own(PyLong_FromLongLong(block->used)); }

  template <typename... Arguments>
  static Reference call(const Reference& method, Arguments... arguments) {
    return own(PyObject_CallFunctionObjArgs(method.get(), arguments..., nullptr));
  }

  const BlockTable& table_;
  const Reference began_;
  const Reference ended_;
  const Reference inserted_;
  const Reference hit_;
  const Reference touched_;
  const Reference held_;
  const Reference released_;
  const Reference evicted_;
  const Reference victim_;
  const Reference clear_;
};

}  // namespace

std::unique_ptr<Policy> make_policy(PyObject* policy, const BlockTable& table) {
  return std::make_unique<PythonPolicy>(policy, table);
}

}  // namespace flexkv::index
