// SPDX-License-Identifier: Apache-2.0
#include <memory>
#include <string_view>

#include "../eviction/python_type.hpp"
#include "policy.hpp"

namespace flexkv::index {

namespace {

class PythonPolicy : public Policy {
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

  void began(PyObject* keys, PyObject* context, PyObject* now) override {
    call(began_, keys, context, now);
  }

  void ended(PyObject* request_id, PyObject* output_tokens, PyObject* now) override {
    call(ended_, request_id, output_tokens, now);
  }

  void inserted(Block* block) override {
    call(inserted_, block->key, block->parent == nullptr ? Py_None : block->parent->key,
         block->fetched ? Py_True : Py_False);
  }

  void hit(Block* block, PyObject* context) override {
    call(hit_, block->key, use_of(block).get(), context);
  }

  void touched(Block* block) override { call(touched_, block->key, use_of(block).get()); }

  void held(Block* block) override { call(held_, block->key); }

  void released(Block* block) override { call(released_, block->key, use_of(block).get()); }

  void evicted(Block* block) override { call(evicted_, block->key); }

  Block* victim() override {
    const Reference key = call(victim_);
    return key.get() == Py_None ? nullptr : evictable_of(key.get());
  }

  bool follows_requests() const noexcept override { return true; }
  void forget_all() override { call(clear_); }
  bool may_be_torn() const noexcept override { return true; }

 protected:
  [[noreturn]] static void unknown(PyObject* key) {
    PyErr_SetObject(PyExc_KeyError, key);
    throw PythonError{};
  }

  // The block that a policy chose by this key.
  Block* evictable_of(PyObject* key) const {
    Block* const block = table_.find(key);
    if (block == nullptr || !block->evictable()) {
      unknown(key);
    }
    return block;
  }

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

// The same for `hazard`, without a call of Python for each block: a step of an engine waits for it.
class HazardPolicy final : public PythonPolicy {
 public:
  HazardPolicy(PyObject* policy, const BlockTable& table, eviction::Hazard& hazard)
      : PythonPolicy(policy, table), hazard_(hazard) {}

  void inserted(Block* block) override {
    const eviction::Key after = block->parent == nullptr ? eviction::Key() : key_of(block->parent);
    if (!hazard_.inserted(key_of(block), block->parent == nullptr ? nullptr : &after,
                          block->fetched)) {
      PyErr_SetString(PyExc_ValueError, "the block is there already, or the tier is full");
      throw PythonError{};
    }
    Py_INCREF(block->key);
  }

  bool may_be_torn() const noexcept override { return false; }
  void hit(Block*, PyObject*) override {}
  void touched(Block*) override {}

  void held(Block* block) override {
    if (!hazard_.held(key_of(block))) {
      unknown(block->key);
    }
  }

  void released(Block* block) override {
    if (!hazard_.released(key_of(block))) {
      unknown(block->key);
    }
  }

  void evicted(Block* block) override {
    auto* const object = static_cast<PyObject*>(hazard_.evicted(key_of(block), block->is_of_reset()));
    if (object == nullptr) {
      unknown(block->key);
    }
    Py_DECREF(object);
  }

  Block* victim() override {
    auto* const object = static_cast<PyObject*>(hazard_.victim());
    return object == nullptr ? nullptr : evictable_of(object);
  }

 private:
  static eviction::Key key_of(PyObject* key) {
    char* data = nullptr;
    Py_ssize_t size = 0;
    if (PyBytes_AsStringAndSize(key, &data, &size) != 0) {
      throw PythonError{};
    }
    return {std::string_view(data, static_cast<std::size_t>(size)), key};
  }

  static eviction::Key key_of(const Block* block) { return key_of(block->key); }

  eviction::Hazard& hazard_;  // the policy's, which the index keeps alive
};

}  // namespace

std::unique_ptr<Policy> make_policy(PyObject* policy, const BlockTable& table) {
  if (eviction::Hazard* const hazard = eviction::hazard_of(policy); hazard != nullptr) {
    return std::make_unique<HazardPolicy>(policy, table, *hazard);
  }
  return std::make_unique<PythonPolicy>(policy, table);
}

}  // namespace flexkv::index
