// Operators: each runs the CPU's kernel on the same memory. Those that make the host wait on a GPU are reported.
#include "emulated.h"

// The headers of single operators: those of all of them take most of the time of a build.
#define TORCH_ASSERT_ONLY_METHOD_OPERATORS
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/enum_tag.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <torch/library.h>

#include <array>
#include <cstring>
#include <set>
#include <string>
#include <utility>
#include <vector>

using at::Tensor;
using c10::Device;
using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::IValue;
using c10::Storage;

namespace emulated {
namespace {

bool on_device(const Tensor& tensor) { return tensor.device().type() == kType; }

// ---- generators ----

// The generator of a device. The CPU's kernels draw from `host`.
struct DeviceGenerator final : c10::GeneratorImpl {
  explicit DeviceGenerator(DeviceIndex device)
      : GeneratorImpl(Device(kType, device), DispatchKeySet(kKey)),
        host(at::detail::createCPUGenerator()) {}
  void set_current_seed(uint64_t seed) override { host.set_current_seed(seed); }
  void set_offset(uint64_t offset) override { host.set_offset(offset); }
  uint64_t get_offset() const override { return host.get_offset(); }
  uint64_t current_seed() const override { return host.current_seed(); }
  uint64_t seed() override { return host.seed(); }
  void set_state(const c10::TensorImpl& state) override { host.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return host.unsafeGetGeneratorImpl()->get_state(); }
  GeneratorImpl* clone_impl() const override {
    auto* copy = new DeviceGenerator(device().index());
    copy->host = host.clone();
    return copy;
  }
  at::Generator host;
};

const at::Generator& default_generator(DeviceIndex device) {
  static const std::array<at::Generator, kMaxDevices> generators = [] {
    std::array<at::Generator, kMaxDevices> made;
    for (DeviceIndex index = 0; index < kMaxDevices; ++index) made[index] = at::make_generator<DeviceGenerator>(index);
    return made;
  }();
  return generators.at(device < 0 ? current_device() : device);
}

at::Generator host_of(const at::Generator& generator) {
  TORCH_CHECK(generator.device().type() == kType, "Expected a 'cuda' device type for generator but found 'cpu'");
  return static_cast<DeviceGenerator*>(generator.unsafeGetGeneratorImpl())->host;
}

// Lets kernels that take no generator draw from the device's instead of the CPU's.
struct DrawFromDevice {
  explicit DrawFromDevice(DeviceIndex device) : generator(host_of(default_generator(device))) {
    before = host.get_state();
    host.set_state(generator.get_state());
  }
  ~DrawFromDevice() {
    generator.set_state(host.get_state());
    host.set_state(before);
  }
  at::Generator host = at::detail::getDefaultCPUGenerator();
  at::Generator generator;
  Tensor before;
};

// ---- the same memory, seen as the CPU's and as a device's ----

void release(void* context) { delete static_cast<Storage*>(context); }

Tensor shaped(Tensor tensor, const Tensor& like) {
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  if (like.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  return tensor;
}

Tensor with_storage(Storage storage, DispatchKey key, const Tensor& like) {
  return shaped(
      at::detail::make_tensor<c10::TensorImpl>(std::move(storage), DispatchKeySet(key), like.dtype()), like);
}

// A view counts versions if its base does, also in inference mode.
Tensor as_view(const Tensor& base, const Tensor& like) {
  return shaped(
      at::detail::make_tensor<c10::TensorImpl>(
          c10::TensorImpl::VIEW, Storage(base.storage()), base.key_set(), like.dtype()),
      like);
}

Tensor as_host(const Tensor& tensor) {
  if (!tensor.defined() || !on_device(tensor)) return tensor;
  Storage kept = tensor.storage();
  c10::DataPtr memory(kept.mutable_data(), new Storage(kept), &release, Device(c10::kCPU));
  Storage seen(Storage::use_byte_size_t(), kept.nbytes(), std::move(memory), c10::GetCPUAllocator(), true);
  return with_storage(std::move(seen), DispatchKey::CPU, tensor);
}

// Memory that a CPU's kernel allocated, which is counted as the device's from here on.
struct Adopted {
  Storage kept;
  DeviceIndex device;
  std::size_t num_bytes;
};

void release_adopted(void* context) {
  auto* adopted = static_cast<Adopted*>(context);
  give_memory(adopted->device, adopted->num_bytes);
  delete adopted;
}

c10::DataPtr adopt(const Storage& storage, Device device) {
  take_memory(device.index(), storage.nbytes());
  return {storage.mutable_data(), new Adopted{storage, device.index(), storage.nbytes()}, &release_adopted, device};
}

// The arguments of one call: tensors of the device, and how the kernel sees them.
struct Call {
  std::vector<std::pair<Tensor, Tensor>> seen;
  Device device{kType, current_device()};
  bool has_host_tensor = false;

  Tensor to_host(const Tensor& tensor) {
    if (!tensor.defined()) return tensor;
    if (!on_device(tensor)) {
      has_host_tensor |= tensor.dim() > 0;
      return tensor;
    }
    for (auto& [own, host] : seen)
      if (own.is_same(tensor)) return host;
    TORCH_CHECK(
        seen.empty() || tensor.device() == device, "Expected all tensors to be on the same device, but found ", device,
        " and ", tensor.device());
    device = tensor.device();
    seen.emplace_back(tensor, as_host(tensor));
    return seen.back().second;
  }

  Tensor to_device(const Tensor& tensor) const {
    if (!tensor.defined()) return tensor;
    for (auto& [own, host] : seen) {
      if (host.is_same(tensor)) return own;
      if (host.storage().is_alias_of(tensor.storage())) return as_view(own, tensor);
    }
    const Storage& storage = tensor.storage();
    Storage adopted(
        Storage::use_byte_size_t(), storage.nbytes(), adopt(storage, device), device_allocator(), true);
    return with_storage(std::move(adopted), kKey, tensor);
  }

  // Kernels with an `out` argument may have resized it.
  void update_resized() {
    for (auto& [own, host] : seen) {
      const Storage& now = host.storage();
      auto* storage = own.storage().unsafeGetStorageImpl();
      if (now.data() != own.storage().data() || now.nbytes() != storage->nbytes()) {
        storage->set_data_ptr_noswap(adopt(now, device));
        storage->set_nbytes(now.nbytes());
      }
      if (own.sizes() != host.sizes() || own.strides() != host.strides())
        own.unsafeGetTensorImpl()->set_sizes_and_strides(host.sizes(), host.strides(), host.storage_offset());
    }
  }

  IValue argument(const IValue& value) {
    if (value.isTensor()) return to_host(value.toTensor());
    if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& tensor : value.toTensorVector()) list.push_back(to_host(tensor));
      return list;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> list;
      for (const std::optional<Tensor>& tensor : value.toOptionalTensorVector())
        list.push_back(tensor ? std::optional<Tensor>(to_host(*tensor)) : tensor);
      return list;
    }
    if (value.isDevice() && value.toDevice().type() == kType) {
      if (value.toDevice().has_index() && seen.empty()) device = value.toDevice();
      return Device(c10::kCPU);
    }
    if (value.isGenerator()) return host_of(value.toGenerator());
    return value;
  }

  IValue result(const IValue& value) const {
    if (value.isTensor()) return to_device(value.toTensor());
    if (!value.isTensorList()) return value;
    c10::List<Tensor> list;
    for (const Tensor& tensor : value.toTensorVector()) list.push_back(to_device(tensor));
    return list;
  }
};

// ---- any operator ----

// Those whose result, or the result's size, the host has to know.
const std::set<std::string> kWaiting = {
    "aten::_local_scalar_dense", "aten::equal",   "aten::masked_select", "aten::nonzero",
    "aten::_unique",             "aten::_unique2", "aten::unique_dim",    "aten::unique_consecutive",
    "aten::bincount",            "aten::repeat_interleave",
};
const std::set<std::string> kIndexing = {
    "aten::index", "aten::index_put_", "aten::index_put", "aten::_index_put_impl_", "aten::_unsafe_index",
};
// Those that take tensors of the host beside the device's.
const std::set<std::string> kMixed = {"aten::_foreach_copy_", "aten::_pack_padded_sequence", "aten::tensor_split"};

void wait_if_needed(const std::string& name, const torch::jit::Stack& arguments, const Call& call) {
  auto stream = current_stream(call.device.index());
  if (kWaiting.count(name)) return synchronize(stream, name.c_str());
  if (!kIndexing.count(name)) {
    TORCH_CHECK(
        !call.has_host_tensor || call.seen.empty() || kMixed.count(name),
        "Expected all tensors to be on the same device, but found at least two devices, ", call.device, " and cpu! (",
        name, ")");
    return;
  }
  for (const IValue& value : arguments) {
    if (!value.isOptionalTensorList() && !value.isTensorList()) continue;
    for (const IValue& item : value.toListRef()) {
      if (!item.isTensor() || !item.toTensor().defined()) continue;
      const Tensor& index = item.toTensor();
      if (index.scalar_type() == at::kBool || index.scalar_type() == at::kByte) synchronize(stream, "index by a mask");
      else if (!on_device(index) && index.dim() > 0) synchronize(stream, "index by a tensor of the host");
    }
  }
}

void run_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  auto first = stack->end() - static_cast<std::ptrdiff_t>(schema.arguments().size());
  const torch::jit::Stack given(first, stack->end());
  Call call;
  bool takes_generator = false;
  for (std::size_t index = 0; index < given.size(); ++index) {
    // A generator that is not given is the device's.
    bool is_generator = schema.arguments()[index].name() == "generator";
    takes_generator |= is_generator;
    if (!is_generator || !given[index].isNone()) *(first + static_cast<std::ptrdiff_t>(index)) = call.argument(given[index]);
  }
  wait_if_needed(schema.operator_name().name, given, call);
  touch(call.device.index());
  for (std::size_t index = 0; takes_generator && index < given.size(); ++index)
    if (schema.arguments()[index].name() == "generator" && given[index].isNone())
      *(first + static_cast<std::ptrdiff_t>(index)) = host_of(default_generator(call.device.index()));
  std::optional<DrawFromDevice> draw;
  if (!takes_generator && op.hasTag(at::Tag::nondeterministic_seeded)) draw.emplace(call.device.index());
  op.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), stack);
  auto results = stack->end() - static_cast<std::ptrdiff_t>(schema.returns().size());
  call.update_resized();
  for (auto value = results; value != stack->end(); ++value) *value = call.result(*value);
}

// ---- operators of their own ----

struct CurrentDevice {
  explicit CurrentDevice(std::optional<Device> device) : before(current_device()) {
    if (device && device->has_index()) set_current_device(device->index());
  }
  ~CurrentDevice() { set_current_device(before); }
  DeviceIndex before;
};

Tensor empty(
    c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  CurrentDevice current(device);
  return at::detail::empty_generic(
      C10_AS_INTARRAYREF_SLOW(size), device_allocator(), DispatchKeySet(kKey), at::dtype_or_default(dtype),
      format);
}

Tensor empty_strided(
    c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>, std::optional<Device> device, std::optional<bool>) {
  CurrentDevice current(device);
  return at::detail::empty_strided_generic(
      C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), device_allocator(),
      DispatchKeySet(kKey), at::dtype_or_default(dtype));
}

// Without the dispatch of autograd: the work may be run later, on another thread.
void write(const Tensor& target, const Tensor& source) {
  at::AutoDispatchBelowADInplaceOrView below;
  target.copy_(source);
}

void upload(const Tensor& device, const Tensor& host, bool asynchronous) {
  auto stream = current_stream(device.device().index());
  bool pinned = is_pinned(host.storage().data());
  if (!asynchronous) synchronize(stream, "copy to the device");
  if (!pinned) report(kPageable, "copy to the device", stream.device_index());
  write(as_host(device), host);
  if (!pinned || !asynchronous) return;
  report(kUpload, "copy to the device", stream.device_index());
  Tensor source = with_storage(host.storage(), DispatchKey::CPU, host);
  Tensor expected = source.clone();
  defer(stream, [=] {
    at::AutoDispatchBelowADInplaceOrView below;
    bool same = expected.numel() == 0 ||
                expected.contiguous().flatten().view(at::kByte).equal(source.contiguous().flatten().view(at::kByte));
    if (!same) report(kRace, "pinned memory was written before it was copied", stream.device_index());
  });
}

void download(const Tensor& host, const Tensor& device, bool asynchronous) {
  auto stream = current_stream(device.device().index());
  if (!asynchronous || !is_pinned(host.storage().data())) {
    synchronize(stream, "copy to the host");
    return write(host, as_host(device));
  }
  report(kDownload, "copy to the host", stream.device_index());
  Tensor target = with_storage(host.storage(), DispatchKey::CPU, host);
  Tensor value = as_host(device).clone();
  defer(stream, [=] { write(target, value); });
}

Tensor& copy_(Tensor& self, const Tensor& source, bool non_blocking) {
  if (source.numel() == 0 && self.numel() == 0) return self;
  if (on_device(self)) touch(self.device().index());
  if (on_device(source)) touch(source.device().index());
  Tensor given = source.expand_as(self);
  if (on_device(self) && !on_device(source)) upload(self, given, non_blocking);
  else if (!on_device(self)) download(self, given, non_blocking);
  else write(as_host(self), as_host(given));
  return self;
}

Tensor& set_storage(
    Tensor& self, Storage source, c10::SymInt offset, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  auto strides = C10_AS_INTARRAYREF_SLOW(stride);
  if (strides.empty() && !sizes.empty()) {
    impl->set_sizes_contiguous(sizes);
    impl->set_storage_offset(offset.expect_int());
  } else {
    impl->set_sizes_and_strides(sizes, strides, offset.expect_int());
  }
  return self;
}

Tensor& set_whole_storage(Tensor& self, Storage source) {
  auto length = static_cast<int64_t>(source.nbytes() / self.itemsize());
  return set_storage(self, std::move(source), 0, c10::SymIntArrayRef({length}), {});
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(source.storage());
  self.unsafeGetTensorImpl()->set_sizes_and_strides(source.sizes(), source.strides(), source.storage_offset());
  return self;
}

void record_stream(Tensor& self, c10::Stream) { touch(self.device().index()); }

// The fused kernels of the CPU have other names than those of CUDA.
int64_t attention_by_formula(
    const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool, std::optional<double>,
    bool) {
  return 0;
}

TORCH_LIBRARY_IMPL(_, EMULATED_KEY, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>()); }
TORCH_LIBRARY_IMPL(aten, EMULATED_KEY, m) {
  m.impl("empty.memory_format", TORCH_FN(empty));
  m.impl("empty_strided", TORCH_FN(empty_strided));
  m.impl("copy_", TORCH_FN(copy_));
  m.impl("set_.source_Storage", TORCH_FN(set_whole_storage));
  m.impl("set_.source_Storage_storage_offset", TORCH_FN(set_storage));
  m.impl("set_.source_Tensor", TORCH_FN(set_tensor));
  m.impl("record_stream", TORCH_FN(record_stream));
  m.impl("_fused_sdp_choice", TORCH_FN(attention_by_formula));
}

}  // namespace
}  // namespace emulated

#ifdef EMULATED_OTHER

struct OtherHooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return emulated::device_count() > 0; }
  bool hasPrimaryContext(c10::DeviceIndex device) const override { return emulated::has_context(device); }
  c10::DeviceIndex deviceCount() const override { return static_cast<c10::DeviceIndex>(emulated::device_count()); }
  c10::DeviceIndex getCurrentDevice() const override { return emulated::current_device(); }
  void setCurrentDevice(c10::DeviceIndex device) const override {
    emulated::touch(device);
    emulated::set_current_device(device);
  }
  bool isPinnedPtr(const void* data) const override { return emulated::is_pinned(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return emulated::pinned_allocator(); }
  Device getDeviceFromPtr(void*) const override { return Device(emulated::kType, emulated::current_device()); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return emulated::default_generator(device);
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return at::make_generator<emulated::DeviceGenerator>(device < 0 ? emulated::current_device() : device);
  }
};
static const bool registered = [] {
  at::RegisterPrivateUse1HooksInterface(new OtherHooks);
  return true;
}();

#else

// torch looks for a class of this very name.
struct CUDAHooks final : at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool hasCUDART() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return emulated::device_count() > 0; }
  bool hasPrimaryContext(c10::DeviceIndex device) const override { return emulated::has_context(device); }
  c10::DeviceIndex deviceCount() const override { return static_cast<c10::DeviceIndex>(emulated::device_count()); }
  int getNumGPUs() const override { return emulated::device_count(); }
  c10::DeviceIndex current_device() const override { return emulated::current_device(); }
  c10::DeviceIndex getCurrentDevice() const override { return emulated::current_device(); }
  void setCurrentDevice(c10::DeviceIndex device) const override {
    emulated::touch(device);
    emulated::set_current_device(device);
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    auto before = emulated::current_device();
    if (device >= 0 && device != before) setCurrentDevice(device);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    auto before = emulated::current_device();
    if (device >= 0) emulated::set_current_device(device);
    return before;
  }
  bool isPinnedPtr(const void* data) const override { return emulated::is_pinned(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return emulated::pinned_allocator(); }
  c10::Allocator* getCUDADeviceAllocator() const override { return emulated::device_allocator(); }
  Device getDeviceFromPtr(void*) const override { return Device(emulated::kType, emulated::current_device()); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return emulated::default_generator(device);
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return at::make_generator<emulated::DeviceGenerator>(device < 0 ? emulated::current_device() : device);
  }
  void deviceSynchronize(c10::DeviceIndex device) const override {
    emulated::synchronize(emulated::current_stream(device), "device");
  }
};
namespace at {
REGISTER_CUDA_HOOKS(CUDAHooks)
}

#endif

// ---- for Python, through ctypes: the default generator of a device ----

extern "C" {
void emulated_seed(int device, uint64_t seed) {
  emulated::host_of(emulated::default_generator(static_cast<c10::DeviceIndex>(device))).set_current_seed(seed);
}
std::size_t emulated_state_size() { return at::detail::getDefaultCPUGenerator().get_state().nbytes(); }
void emulated_get_state(int device, void* target) {
  at::Tensor state = emulated::default_generator(static_cast<c10::DeviceIndex>(device)).get_state();
  std::memcpy(target, state.const_data_ptr(), state.nbytes());
}
void emulated_set_state(int device, const void* source) {
  const at::Generator& generator = emulated::default_generator(static_cast<c10::DeviceIndex>(device));
  at::Tensor state = generator.get_state().clone();
  std::memcpy(state.mutable_data_ptr(), source, state.nbytes());
  const_cast<at::Generator&>(generator).set_state(state);
}
}
