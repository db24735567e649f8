// A process group in place of NCCL's: gloo does the work, on the same memory. Each collective is complete when it
// returns, so the host waits for the other ranks here, which is not reported: on a GPU it would not.
#include <ATen/ATen.h>
#include <pybind11/chrono.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>
#include <torch/csrc/utils/pybind.h>

#include <utility>
#include <vector>

#include "emulated.h"

namespace emulated {
namespace {

using at::Tensor;
using Tensors = std::vector<Tensor>;
using WorkPointer = c10::intrusive_ptr<c10d::Work>;

void release(void* context) { delete static_cast<c10::Storage*>(context); }

Tensor as_host(const Tensor& tensor) {
  TORCH_CHECK(tensor.is_cuda(), "No backend type associated with device type cpu");
  touch(tensor.device().index());
  c10::Storage kept = tensor.storage();
  c10::DataPtr memory(kept.mutable_data(), new c10::Storage(kept), &release, c10::Device(c10::kCPU));
  c10::Storage seen(c10::Storage::use_byte_size_t(), kept.nbytes(), std::move(memory), nullptr, false);
  auto host = at::detail::make_tensor<c10::TensorImpl>(
      std::move(seen), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  host.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  return host;
}

Tensors as_host(const Tensors& tensors) {
  Tensors hosts;
  for (const auto& tensor : tensors) hosts.push_back(as_host(tensor));
  return hosts;
}

std::vector<Tensors> as_host(const std::vector<Tensors>& lists) {
  std::vector<Tensors> hosts;
  for (const auto& tensors : lists) hosts.push_back(as_host(tensors));
  return hosts;
}

struct Finished final : c10d::Work {
  Finished(c10d::OpType type, Tensors results) : Work(-1, type), results_(std::move(results)) {}
  bool isCompleted() override { return true; }
  bool isSuccess() const override { return true; }
  bool wait(std::chrono::milliseconds) override { return true; }
  void synchronize() override {}
  Tensors result() override { return results_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    std::vector<c10::Device> devices;
    if (!results_.empty()) devices.push_back(results_[0].device());
    auto future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()), devices);
    future->markCompleted(c10::IValue(results_));
    return future;
  }

 private:
  Tensors results_;
};

// DDP times its reductions; there is no time of the device here.
struct NoTimer final : c10d::Timer {
  explicit NoTimer(c10::Device) {}
  std::optional<int64_t> measureDifference(Event, Event) override { return std::nullopt; }
};
struct Options final : c10d::Backend::Options {
  Options() : c10d::Backend::Options("nccl") {}
  bool is_high_priority_stream = false;
};

struct Group final : c10d::Backend {
  Group(c10::intrusive_ptr<Backend> gloo, int rank, int size, c10::intrusive_ptr<Options> options)
      : Backend(rank, size), gloo_(std::move(gloo)), options_(std::move(options)) {}

  const std::string getBackendName() const override { return "nccl"; }
  c10::intrusive_ptr<Backend::Options> getBackendOptions() override { return options_; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return 0; }
  void setTimeout(std::chrono::milliseconds timeout) override { gloo_->setTimeout(timeout); }
  void abort() override { gloo_->abort(); }
  void shutdown() override { gloo_->shutdown(); }

  WorkPointer broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    auto hosts = as_host(tensors);
    return finish(gloo_->broadcast(hosts, options), tensors, c10d::OpType::BROADCAST);
  }
  WorkPointer allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    auto hosts = as_host(tensors);
    auto given = options;
    bool is_mean = take_mean(given.reduceOp);
    auto work = finish(gloo_->allreduce(hosts, given), tensors, c10d::OpType::ALLREDUCE);
    if (is_mean) divide(hosts);
    return work;
  }
  WorkPointer allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    c10d::AllreduceOptions given;
    given.reduceOp = options.reduceOp;
    for (auto& tensor : tensors) {
      Tensors one{tensor};
      allreduce(one, given);
    }
    return c10::make_intrusive<Finished>(c10d::OpType::ALLREDUCE_COALESCED, tensors);
  }
  WorkPointer reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    auto hosts = as_host(tensors);
    auto given = options;
    bool is_mean = take_mean(given.reduceOp);
    auto work = finish(gloo_->reduce(hosts, given), tensors, c10d::OpType::REDUCE);
    if (is_mean && getRank() == options.rootRank) divide(hosts);
    return work;
  }
  WorkPointer allgather(
      std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    auto targets = as_host(outputs);
    auto sources = as_host(inputs);
    return finish(gloo_->allgather(targets, sources, options), outputs[0], c10d::OpType::ALLGATHER);
  }
  WorkPointer _allgather_base(Tensor& output, Tensor& input, const c10d::AllgatherOptions& options) override {
    auto target = as_host(output);
    auto source = as_host(input);
    return finish(gloo_->_allgather_base(target, source, options), {output}, c10d::OpType::_ALLGATHER_BASE);
  }
  WorkPointer allgather_into_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    for (std::size_t index = 0; index < outputs.size(); ++index) _allgather_base(outputs[index], inputs[index], options);
    return c10::make_intrusive<Finished>(c10d::OpType::COALESCED, outputs);
  }
  WorkPointer _reduce_scatter_base(
      Tensor& output, Tensor& input, const c10d::ReduceScatterOptions& options) override {
    auto target = as_host(output);
    auto source = as_host(input);
    auto given = options;
    bool is_mean = take_mean(given.reduceOp);
    auto work =
        finish(gloo_->_reduce_scatter_base(target, source, given), {output}, c10d::OpType::_REDUCE_SCATTER_BASE);
    if (is_mean) target.div_(getSize());
    return work;
  }
  WorkPointer reduce_scatter_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) override {
    for (std::size_t index = 0; index < outputs.size(); ++index)
      _reduce_scatter_base(outputs[index], inputs[index], options);
    return c10::make_intrusive<Finished>(c10d::OpType::COALESCED, outputs);
  }
  WorkPointer alltoall_base(
      Tensor& output, Tensor& input, std::vector<int64_t>& output_sizes, std::vector<int64_t>& input_sizes,
      const c10d::AllToAllOptions& options) override {
    auto target = as_host(output);
    auto source = as_host(input);
    return finish(
        gloo_->alltoall_base(target, source, output_sizes, input_sizes, options), {output},
        c10d::OpType::ALLTOALL_BASE);
  }
  // On a GPU the host waits here as well.
  WorkPointer barrier(const c10d::BarrierOptions&) override {
    report(kSync, "barrier", current_device());
    return finish(gloo_->barrier(c10d::BarrierOptions()), {}, c10d::OpType::BARRIER);
  }

 private:
  // gloo has no mean.
  static bool take_mean(c10d::ReduceOp& op) {
    if (op != c10d::ReduceOp::AVG) return false;
    op = c10d::ReduceOp::SUM;
    return true;
  }
  void divide(Tensors& hosts) const {
    for (auto& host : hosts) host.div_(getSize());
  }
  static WorkPointer finish(const WorkPointer& work, Tensors results, c10d::OpType type) {
    work->wait();
    return c10::make_intrusive<Finished>(type, std::move(results));
  }

  c10::intrusive_ptr<Backend> gloo_;
  c10::intrusive_ptr<Options> options_;
};

c10::intrusive_ptr<Group> create(
    const py::object& store, int rank, int size, const c10::intrusive_ptr<Options>& options) {
  auto gloo = py::module::import("torch._C._distributed_c10d").attr("ProcessGroupGloo");
  auto made = gloo(store, rank, size, options->timeout);
  return c10::make_intrusive<Group>(made.cast<c10::intrusive_ptr<c10d::Backend>>(), rank, size, options);
}

// FSDP frees and allocates the memory of a storage again.
void resize_storage(const Tensor& tensor, std::size_t num_bytes) {
  auto* storage = tensor.storage().unsafeGetStorageImpl();
  auto before = current_device();
  set_current_device(tensor.device().index());
  auto memory = device_allocator()->allocate(num_bytes);
  set_current_device(before);
  auto kept = std::min(num_bytes, storage->nbytes());
  if (kept) device_allocator()->copy_data(memory.get(), storage->data(), kept);
  storage->set_data_ptr_noswap(std::move(memory));
  storage->set_nbytes(num_bytes);
}

}  // namespace
}  // namespace emulated

namespace c10d {
C10_REGISTER_TYPED_CLASS(TimerRegistry, c10::kCUDA, emulated::NoTimer)
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace emulated;
  auto base = py::module::import("torch._C._distributed_c10d").attr("Backend");
  py::class_<Group, c10::intrusive_ptr<Group>, c10d::Backend> group(m, "ProcessGroupNCCL");
  group.def(py::init(&create));
  group.def("perform_nocolor_split", [](Group&, const py::object&) {});
  py::class_<Options, c10::intrusive_ptr<Options>, c10d::Backend::Options>(group, "Options", py::dynamic_attr())
      .def(py::init<>())
      .def_readwrite("is_high_priority_stream", &Options::is_high_priority_stream);
  m.def("resize_storage", &resize_storage);
  m.def("default_generator", [](int device) {
    return at::globalContext().defaultGenerator(c10::Device(c10::kCUDA, static_cast<DeviceIndex>(device)));
  });
}
