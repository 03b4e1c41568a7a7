// A GPU in main memory, which keeps account of streams: see simulated_gpu.py.
//
// Operations on "cuda" tensors run on the CPU at once. What a GPU would leave open is checked by vector clocks. A stream's clock
// says how far into each stream it has waited, by events or because the host has; each operation is one tick of its stream.
// Memory remembers who used which of its bytes and when. An error is
//   - an operation that reads what another stream writes, or writes what another one uses, without having waited for it;
//   - an allocation that may get memory which was freed while another stream used it, without `record_stream`.
// A kernel of Triton's is one operation, which uses the bytes that its programs load, store or change by atomics. Errors are also
//   - an access to what is no memory of the GPU, and a load of bytes that nothing has written;
//   - programs of a launch, or threads of a program without a barrier between them, of which one stores what another one uses.
//     It may store what is stored there already. Elements are taken to be of one thread if their places in tensors of the same
//     number of elements are the same.
// A strided tensor counts as all bytes from its first element to its last.
// A copy to pinned memory that does not block happens when the host waits for it; until then the memory holds 0xFF.
// All host threads share one clock, so what one of them has waited for counts for all.

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>
#include <torch/library.h>

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <future>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

namespace {

using at::Tensor;
using c10::DeviceType;

const c10::Device GPU(DeviceType::CUDA, 0);

// ---- who has waited for whom ----

using Clock = std::map<int64_t, uint64_t>;  // by stream: how many of its operations are over

struct Use {
    size_t begin, end;  // bytes
    int64_t stream;
    uint64_t tick;
    bool writes;
    std::string operation;
};

struct Memory {
    char* base;
    size_t size;
    int64_t stream;  // on which it is handed out again
    std::vector<char> is_written;  // by byte
    std::vector<Use> uses;
    std::set<int64_t> recorded;
};

struct LateCopy {
    int64_t stream;
    uint64_t tick;
    Tensor target, source;
};

// Nothing is done under the lock that needs Python's: a tensor may have an object there, which a change of its count looks at.
std::mutex lock;
std::map<int64_t, Clock> clocks;
Clock host;
std::map<int64_t, std::vector<Use>> in_use_when_freed;  // by the stream on which the memory may be handed out again
std::vector<LateCopy> late;
std::vector<std::string> races;
std::set<const void*> pinned;
std::set<const void*> unordered;  // memory on which streams add without an order
std::map<const char*, Memory*> memories;  // by their address
int64_t num_streams = 1;
thread_local int64_t current = 0;

constexpr int NOBODY = -1, MANY = -2;

struct Byte {  // in one launch
    int users[3] = {NOBODY, NOBODY, NOBODY};  // the program, by action
    std::tuple<int, int, int> threads[2];     // that loaded and stored it last: how many barriers before, which lane, of how many
};

struct Kernel {
    std::string name;
    int64_t stream;
    uint64_t tick;
    int program = 0, barriers = 0;
    std::map<Memory*, std::vector<Byte>> bytes;
    Clock clock;
} kernel;  // one at a time

void wait(Clock& clock, const Clock& other) {
    for (auto& [stream, tick] : other) clock[stream] = std::max(clock[stream], tick);
}

bool is_over(const Use& use, const Clock& clock) {
    auto found = clock.find(use.stream);
    return found != clock.end() && found->second >= use.tick;
}

void raise(const std::string& race) {
    {
        std::lock_guard<std::mutex> guard(lock);
        races.push_back(race);
    }
    TORCH_CHECK(false, race);
}

std::string described(const Use& use) {
    return std::string(use.writes ? "the write" : "the read") + " by " + use.operation + " on stream " + std::to_string(use.stream);
}

// Keep account of a use; the race, if there is one.
std::string noted(Memory& memory, const Use& now, const Clock& clock) {
    if (now.writes) std::fill(memory.is_written.begin() + now.begin, memory.is_written.begin() + now.end, true);
    if (unordered.count(memory.base)) return "";
    std::vector<Use> uses;
    std::string race;
    for (auto& use : memory.uses) {
        bool waited = is_over(use, clock), meets = use.begin < now.end && now.begin < use.end;
        if (meets && !waited && (now.writes || use.writes)) race = described(now) + " has not waited for " + described(use);
        // A later use that waits for this one waits for those before it too.
        bool is_inside = now.begin <= use.begin && use.end <= now.end;
        bool covered = waited && is_inside && (now.writes || (!use.writes && use.stream == now.stream));
        if (!covered) uses.push_back(use);
    }
    uses.push_back(now);
    memory.uses = std::move(uses);
    return race;
}

// One operation on the current stream; the tensors that it reads and writes.
struct Operation {
    std::string name;
    std::vector<std::pair<Tensor, bool>> tensors;

    void use(const Tensor& tensor, bool writes) {
        if (tensor.defined() && tensor.is_cuda() && tensor.numel()) tensors.emplace_back(tensor, writes);
    }

    uint64_t start() const {
        std::string race;
        uint64_t tick;
        {
            std::lock_guard<std::mutex> guard(lock);
            Clock& clock = clocks[current];
            wait(clock, host);
            tick = ++clock[current];
            for (auto& [tensor, writes] : tensors) {
                if (race.empty()) race = note(tensor, writes, clock, tick);
            }
        }
        if (!race.empty()) raise(race);
        return tick;
    }

private:
    std::string note(const Tensor& tensor, bool writes, const Clock& clock, uint64_t tick) const {
        auto& memory = *static_cast<Memory*>(tensor.storage().data_ptr().get_context());
        int64_t last = 0;
        for (int64_t i = 0; i < tensor.dim(); ++i) last += (tensor.size(i) - 1) * tensor.stride(i);
        size_t begin = static_cast<char*>(tensor.data_ptr()) - memory.base;
        return noted(memory, {begin, begin + (last + 1) * tensor.element_size(), current, tick, writes, name}, clock);
    }
};

void host_waits(const Clock& clock) {
    std::vector<LateCopy> due;
    {
        std::lock_guard<std::mutex> guard(lock);
        wait(host, clock);
        auto is_late = [](const LateCopy& copy) { return host[copy.stream] < copy.tick; };
        auto first_due = std::partition(late.begin(), late.end(), is_late);
        due.assign(std::make_move_iterator(first_due), std::make_move_iterator(late.end()));
        late.erase(first_due, late.end());
    }
    for (auto& copy : due) copy.target.copy_(copy.source);
}

Clock clock_of(int64_t stream) {
    std::lock_guard<std::mutex> guard(lock);
    wait(clocks[stream], host);
    return clocks[stream];
}

// ---- memory ----

void free_memory(void* context) {
    auto* memory = static_cast<Memory*>(context);
    {
        std::lock_guard<std::mutex> guard(lock);
        for (auto& use : memory->uses) {
            // What it is recorded for is waited for, and so is what that stream has waited for.
            bool is_kept = use.stream == memory->stream;
            for (auto stream : memory->recorded) is_kept |= is_over(use, clocks[stream]);
            if (!is_kept) in_use_when_freed[memory->stream].push_back(use);
        }
        unordered.erase(memory->base);
        memories.erase(memory->base);
        kernel.bytes.erase(memory);
    }
    if (memory->base) memset(memory->base, 0xFF, memory->size);
    free(memory->base);
    delete memory;
}

char* aligned(size_t size) {
    void* base = nullptr;
    if (posix_memalign(&base, 512, size)) throw std::bad_alloc();
    return static_cast<char*>(memset(base, 0xFF, size));
}

struct Allocator final : c10::Allocator {
    c10::DataPtr allocate(size_t size) override {
        std::string race;
        {
            std::lock_guard<std::mutex> guard(lock);
            wait(clocks[current], host);
            for (auto& use : in_use_when_freed[current]) {
                if (!is_over(use, clocks[current])) race = "memory was freed and may be taken again before " + described(use);
            }
            in_use_when_freed[current].clear();
        }
        if (!race.empty()) raise(race);
        auto* memory = new Memory{size ? aligned(size) : nullptr, size, current, std::vector<char>(size), {}, {}};
        std::lock_guard<std::mutex> guard(lock);
        if (size) memories[memory->base] = memory;
        return {memory->base, memory, &free_memory, GPU};
    }
    void copy_data(void* target, const void* source, size_t size) const override { memcpy(target, source, size); }
} allocator;

void free_pinned(void* base) {
    {
        std::lock_guard<std::mutex> guard(lock);
        pinned.erase(base);
    }
    free(base);
}

struct PinnedAllocator final : c10::Allocator {
    c10::DataPtr allocate(size_t size) override {
        void* base = aligned(std::max<size_t>(size, 1));
        std::lock_guard<std::mutex> guard(lock);
        pinned.insert(base);
        return {base, base, &free_pinned, c10::Device(DeviceType::CPU)};
    }
    void copy_data(void* target, const void* source, size_t size) const override { memcpy(target, source, size); }
} pinned_allocator;

// ---- streams and events, as PyTorch asks for them ----

c10::Stream stream_of(int64_t id) { return c10::Stream(c10::Stream::UNSAFE, GPU, id); }

struct Streams final : c10::impl::DeviceGuardImplInterface {
    DeviceType type() const override { return DeviceType::CUDA; }
    c10::Device exchangeDevice(c10::Device) const override { return GPU; }
    c10::Device getDevice() const override { return GPU; }
    void setDevice(c10::Device) const override {}
    void uncheckedSetDevice(c10::Device) const noexcept override {}
    c10::DeviceIndex deviceCount() const noexcept override { return 1; }
    c10::Stream getStream(c10::Device) const override { return stream_of(current); }
    c10::Stream getDefaultStream(c10::Device) const override { return stream_of(0); }
    c10::Stream getNewStream(c10::Device, int) const override {
        std::lock_guard<std::mutex> guard(lock);
        return stream_of(num_streams++);
    }
    c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override { return getNewStream(GPU, 0); }
    c10::Stream exchangeStream(c10::Stream stream) const override { return stream_of(std::exchange(current, stream.id())); }
    void record(void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag) const override {
        if (!*event) *event = new Clock;
        *static_cast<Clock*>(*event) = clock_of(stream.id());
    }
    void block(void* event, const c10::Stream& stream) const override {
        std::lock_guard<std::mutex> guard(lock);
        if (event) wait(clocks[stream.id()], *static_cast<Clock*>(event));
    }
    bool queryEvent(void* event) const override {  // work is over as soon as somebody looks
        if (event) host_waits(*static_cast<Clock*>(event));
        return true;
    }
    void synchronizeEvent(void* event) const override { queryEvent(event); }
    void destroyEvent(void* event, c10::DeviceIndex) const noexcept override { delete static_cast<Clock*>(event); }
    void synchronizeStream(const c10::Stream& stream) const override { host_waits(clock_of(stream.id())); }
    bool queryStream(const c10::Stream& stream) const override {
        synchronizeStream(stream);
        return true;
    }
    void synchronizeDevice(c10::DeviceIndex) const override {
        Clock all;
        {
            std::lock_guard<std::mutex> guard(lock);
            for (auto& [stream, clock] : clocks) wait(all, clock);
        }
        host_waits(all);
    }
    void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
        std::lock_guard<std::mutex> guard(lock);
        if (data.device() == GPU) static_cast<Memory*>(data.get_context())->recorded.insert(stream.id());
    }
};
C10_REGISTER_GUARD_IMPL(CUDA, Streams)

struct CUDAHooks final : at::CUDAHooksInterface {  // PyTorch looks for this name
    explicit CUDAHooks(at::CUDAHooksArgs) {}
    void init() const override {}
    bool hasCUDA() const override { return true; }
    bool isBuilt() const override { return true; }
    bool isAvailable() const override { return true; }
    bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
    c10::DeviceIndex deviceCount() const override { return 1; }
    int getNumGPUs() const override { return 1; }
    c10::DeviceIndex getCurrentDevice() const override { return 0; }
    c10::DeviceIndex current_device() const override { return 0; }
    void setCurrentDevice(c10::DeviceIndex) const override {}
    c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
    c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
    bool isPinnedPtr(const void* data) const override {
        std::lock_guard<std::mutex> guard(lock);
        return pinned.count(data);
    }
    c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
    c10::Allocator* getCUDADeviceAllocator() const override { return &allocator; }
};
using at::CUDAHooksArgs;
using at::CUDAHooksInterface;
using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
REGISTER_CUDA_HOOKS(CUDAHooks)

// ---- tensors ----

const c10::DispatchKeySet KEYS(c10::DispatchKey::CUDA);

Tensor in_main_memory(const Tensor& tensor) {
    auto options = tensor.options().device(at::kCPU);
    if (tensor.numel() == 0) return at::empty_strided(tensor.sizes(), tensor.strides(), options);
    return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), options);
}

Tensor view_of(const Tensor& base, at::IntArrayRef sizes, at::IntArrayRef strides, int64_t offset, at::ScalarType type) {
    auto made = at::detail::make_tensor<at::TensorImpl>(
        c10::TensorImpl::VIEW, c10::Storage(base.storage()), base.key_set(), c10::scalarTypeToTypeMeta(type));
    made.unsafeGetTensorImpl()->set_storage_offset(offset);
    made.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
    return made;
}

using Type = std::optional<at::ScalarType>;

Tensor empty(at::IntArrayRef sizes, Type type, std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>,
             std::optional<at::MemoryFormat> format) {
    return at::detail::empty_generic(sizes, &allocator, KEYS, c10::dtype_or_default(type), format);
}

Tensor empty_strided(at::IntArrayRef sizes, at::IntArrayRef strides, Type type, std::optional<at::Layout>,
                     std::optional<at::Device>, std::optional<bool>) {
    return at::detail::empty_strided_generic(sizes, strides, &allocator, KEYS, c10::dtype_or_default(type));
}

Tensor strided(const Tensor& self, at::IntArrayRef sizes, at::IntArrayRef strides, std::optional<int64_t> offset) {
    return view_of(self, sizes, strides, offset.value_or(self.storage_offset()), self.scalar_type());
}

Tensor reshape_alias(const Tensor& self, at::IntArrayRef sizes, at::IntArrayRef strides) {
    return strided(self, sizes, strides, std::nullopt);
}

Tensor view(const Tensor& self, at::IntArrayRef sizes) {
    auto made = in_main_memory(self).view(sizes);
    return strided(self, made.sizes(), made.strides(), std::nullopt);
}

Tensor unfold(const Tensor& self, int64_t dim, int64_t size, int64_t step) {
    auto made = in_main_memory(self).unfold(dim, size, step);
    return strided(self, made.sizes(), made.strides(), std::nullopt);
}

void resize_storage(const Tensor& self, int64_t size) {
    auto* storage = self.storage().unsafeGetStorageImpl();
    auto data = allocator.allocate(size);
    auto kept = std::min<size_t>(size, storage->nbytes());
    if (kept) {
        memcpy(data.get(), storage->data(), kept);
        auto& before = static_cast<Memory*>(storage->data_ptr().get_context())->is_written;
        std::copy_n(before.begin(), kept, static_cast<Memory*>(data.get_context())->is_written.begin());
    }
    storage->set_data_ptr(std::move(data));
    storage->set_nbytes(size);
}

const Tensor& resize_(const Tensor& self, at::IntArrayRef sizes, std::optional<at::MemoryFormat>) {
    int64_t numel = c10::multiply_integers(sizes), needed = (numel + self.storage_offset()) * self.element_size();
    if (numel && static_cast<int64_t>(self.storage().nbytes()) < needed) resize_storage(self, needed);
    self.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
    return self;
}

Tensor& set_(Tensor& self, at::Storage storage, int64_t offset, at::IntArrayRef sizes, at::IntArrayRef strides) {
    auto* made = self.unsafeGetTensorImpl();
    made->set_storage_keep_dtype(storage);
    made->set_storage_offset(offset);
    made->set_sizes_and_strides(sizes, strides);
    return self;
}

Tensor& set_storage_(Tensor& self, at::Storage storage) {
    int64_t numel = storage.nbytes() / self.element_size(), stride = 1;
    return set_(self, storage, 0, {&numel, 1}, {&stride, 1});
}

Tensor& set_tensor_(Tensor& self, const Tensor& source) {
    return set_(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

void record_stream(Tensor& self, c10::Stream stream) { Streams().recordDataPtrOnStream(self.storage().data_ptr(), stream); }

at::Scalar item(const Tensor& self) {
    Operation operation{"item", {}};
    operation.use(self, false);
    operation.start();
    host_waits(clock_of(current));
    return in_main_memory(self).item();
}

Tensor& copy_(Tensor& self, const Tensor& source, bool non_blocking) {
    if (self.is_same(source)) return self;
    at::NoGradGuard no_grad;
    Operation operation{"copy_", {}};
    operation.use(source, false);
    operation.use(self, true);
    auto tick = operation.start();
    auto target = self.is_cuda() ? in_main_memory(self) : self.detach();
    auto from = (source.is_cuda() ? in_main_memory(source) : source.detach()).expand_as(target);
    if (non_blocking && !self.is_cuda() && self.is_pinned()) {
        TORCH_CHECK(self.is_contiguous(), "a copy to strided pinned memory is not simulated");
        LateCopy copy{current, tick, std::move(target), from.clone()};
        memset(self.data_ptr(), 0xFF, self.nbytes());
        std::lock_guard<std::mutex> guard(lock);
        late.push_back(std::move(copy));
    } else {
        target.copy_(from);
        if (!non_blocking && self.is_cuda() != source.is_cuda()) host_waits(clock_of(current));
    }
    return self;
}

// ---- all other operations ----

const std::set<std::string> TAKE_INDICES{"aten::index.Tensor", "aten::_index_put_impl_"};  // in main memory too
const std::set<std::string> WAIT{"aten::nonzero", "aten::masked_select", "aten::equal", "aten::_unique2",
                                 "aten::unique_consecutive", "aten::unique_dim", "aten::repeat_interleave.Tensor"};

at::Generator& generator() {
    static auto made = at::make_generator<at::CPUGeneratorImpl>(0);
    return made;
}

void run(const c10::OperatorHandle& handle, torch::jit::Stack* stack) {
    auto& schema = handle.schema();
    auto begin = stack->size() - schema.arguments().size();
    Operation operation{c10::toString(handle.operator_name()), {}};
    std::vector<std::pair<Tensor, Tensor>> pairs;  // a tensor, and its memory as a tensor of the CPU
    bool host_must_wait = WAIT.count(operation.name);
    auto moved = [&](const Tensor& tensor, const c10::Argument& argument, bool is_index = false) {
        bool writes = argument.alias_info() && argument.alias_info()->isWrite();
        if (!tensor.defined()) return tensor;
        if (!tensor.is_cuda()) {
            TORCH_CHECK(!writes && (tensor.dim() == 0 || (is_index && TAKE_INDICES.count(operation.name))),
                        operation.name, ": '", argument.name(), "' is in main memory, and other tensors are on the GPU");
            return tensor;
        }
        host_must_wait |= is_index && (tensor.scalar_type() == at::kBool || tensor.scalar_type() == at::kByte);
        operation.use(tensor, writes);
        pairs.emplace_back(tensor, in_main_memory(tensor));
        return pairs.back().second;
    };
    for (size_t i = 0; i < schema.arguments().size(); ++i) {
        auto& argument = schema.arguments()[i];
        auto& value = (*stack)[begin + i];
        if (value.isTensor()) {
            value = moved(value.toTensor(), argument);
        } else if (value.isTensorList()) {
            auto tensors = value.toTensorVector();
            for (auto& tensor : tensors) tensor = moved(tensor, argument);
            value = tensors;
        } else if (value.isOptionalTensorList()) {
            auto tensors = value.toOptionalTensorVector();
            for (auto& tensor : tensors) tensor = tensor ? moved(*tensor, argument, true) : tensor;
            value = tensors;
        } else if (value.isDevice()) {
            value = c10::Device(at::kCPU);
        } else if (argument.name() == "generator") {
            TORCH_CHECK(value.isNone(), operation.name, ": expected a generator of 'cuda', got one of the CPU");
            value = generator();
        }
    }
    operation.start();
    if (host_must_wait) host_waits(clock_of(current));
    handle.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);

    at::NoGradGuard no_grad;
    Operation results{operation.name, {}};
    auto filled = [&](const Tensor& tensor, const Tensor& values) {
        if (values.numel()) in_main_memory(tensor).copy_(values);
        results.use(tensor, true);
        return tensor;
    };
    for (auto& [tensor, memory] : pairs) {
        if (memory.sizes() == tensor.sizes()) continue;
        resize_(tensor, memory.sizes(), std::nullopt);  // what is written to was given a size
        tensor.unsafeGetTensorImpl()->set_sizes_and_strides(memory.sizes(), memory.strides());
        filled(tensor, memory);
    }
    auto on_gpu = [&](const Tensor& made, bool may_be_view) {
        if (!made.defined()) return made;
        for (auto& [tensor, memory] : pairs) {
            if (memory.is_same(made)) return tensor;
            auto* base = static_cast<char*>(tensor.storage().mutable_data());
            auto* data = static_cast<char*>(made.data_ptr());
            if (may_be_view && made.numel() && data >= base && data < base + tensor.storage().nbytes())
                return view_of(tensor, made.sizes(), made.strides(), (data - base) / made.element_size(), made.scalar_type());
        }
        return filled(at::detail::empty_strided_generic(made.sizes(), made.strides(), &allocator, KEYS, made.scalar_type()), made);
    };
    auto first = stack->size() - schema.returns().size();
    for (size_t i = 0; i < schema.returns().size(); ++i) {
        auto& value = (*stack)[first + i];
        bool may_be_view = schema.returns()[i].alias_info();
        if (value.isTensor()) {
            value = on_gpu(value.toTensor(), may_be_view);
        } else if (value.isTensorList()) {
            auto tensors = value.toTensorVector();
            for (auto& tensor : tensors) tensor = on_gpu(tensor, may_be_view);
            value = tensors;
        }
    }
    if (!results.tensors.empty()) results.start();
}

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
    m.impl("empty.memory_format", empty);
    m.impl("empty_strided", empty_strided);
    m.impl("as_strided", strided);
    m.impl("_reshape_alias", reshape_alias);
    m.impl("view", view);
    m.impl("unfold", unfold);
    m.impl("resize_", resize_);
    m.impl("set_.source_Storage_storage_offset", set_);
    m.impl("set_.source_Storage", set_storage_);
    m.impl("set_.source_Tensor", set_tensor_);
    m.impl("record_stream", record_stream);
    m.impl("_local_scalar_dense", item);
    m.impl("copy_", copy_);
}

// ---- kernels of Triton, whose programs its interpreter runs one after the other ----

enum Action { LOADS, STORES, CHANGES };  // the last one by atomics
const char* const ACTIONS[] = {"loads", "stores", "changes"};

void begin_kernel(std::string name) {
    auto tick = Operation{name, {}}.start();
    auto clock = clock_of(current);
    std::lock_guard<std::mutex> guard(lock);
    kernel = {std::move(name), current, tick, 0, 0, {}, std::move(clock)};
}

void begin_program(int64_t program) { kernel.program = program, kernel.barriers = 0; }

void pass_barrier() { ++kernel.barriers; }

// What is wrong with an action of the program on a byte: what it does to "what" this says.
std::string problem(Byte& byte, Action action, int lane, int num_lanes, bool is_written, bool changes_nothing) {
    auto others = [&](int does) { return byte.users[does] != NOBODY && byte.users[does] != kernel.program; };
    auto other_threads = [&](int does) {
        auto [barriers, at, of] = byte.threads[does];  // of a single number one thread is the writer, and all are readers
        bool is_same = lane == at && num_lanes == of && num_lanes > 1;
        return byte.users[does] == kernel.program && barriers == kernel.barriers && !is_same;
    };
    if (action != STORES && !is_written && byte.users[STORES] == NOBODY && byte.users[CHANGES] == NOBODY) return "nothing has written";
    for (auto does : {LOADS, STORES, CHANGES}) {
        if (changes_nothing || (does == action && does != STORES)) continue;
        if (others(does)) return std::string("another program ") + ACTIONS[does];
        bool one_stores = does == STORES && action == STORES && num_lanes == 1 && std::get<2>(byte.threads[STORES]) == 1;
        if (does != CHANGES && action != CHANGES && !one_stores && other_threads(does)) return std::string("another thread ") + ACTIONS[does];
    }
    int& user = byte.users[action];
    bool is_shared = user == kernel.program && action != CHANGES && std::get<0>(byte.threads[action]) == kernel.barriers &&
                     std::get<1>(byte.threads[action]) != lane;
    user = user == NOBODY || user == kernel.program ? kernel.program : MANY;
    if (action != CHANGES) byte.threads[action] = {kernel.barriers, is_shared ? MANY : lane, num_lanes};
    return "";
}

// Some of a program's lanes use elements of so many bytes at addresses; what they store there.
void use_in_kernel(const Tensor& lanes, const Tensor& addresses, const Tensor& stored, int64_t num_lanes, int64_t size, int64_t action) {
    std::string found;
    {
        std::lock_guard<std::mutex> guard(lock);
        auto* places = addresses.data_ptr<int64_t>();
        auto* values = static_cast<const char*>(stored.data_ptr());
        for (int64_t n = 0; n < addresses.numel() && found.empty(); ++n) {
            auto* place = reinterpret_cast<char*>(places[n]);
            auto after = memories.upper_bound(place);
            auto* memory = after == memories.begin() ? nullptr : std::prev(after)->second;
            if (!memory || place + size > memory->base + memory->size) {
                found = "no memory of the GPU has";
                break;
            }
            auto& bytes = kernel.bytes[memory];
            bytes.resize(memory->size);
            for (int64_t i = 0; i < size && found.empty(); ++i) {
                auto at = place + i - memory->base;
                bool changes_nothing = action == STORES && bytes[at].users[STORES] != NOBODY && values[n * size + i] == place[i];
                found = problem(bytes[at], Action(action), lanes.data_ptr<int64_t>()[n], num_lanes, memory->is_written[at], changes_nothing);
                if (action == STORES) place[i] = values[n * size + i];
            }
        }
    }
    auto who = kernel.name + ": program " + std::to_string(kernel.program) + " ";
    if (!found.empty()) raise(who + ACTIONS[action] + " what " + found);
}

void end_kernel() {
    std::string race;
    {
        std::lock_guard<std::mutex> guard(lock);
        auto note = [&](Memory& memory, const std::vector<Byte>& bytes, bool writes) {
            auto is_used = [&](const Byte& byte) {
                return writes ? byte.users[STORES] != NOBODY || byte.users[CHANGES] != NOBODY : byte.users[LOADS] != NOBODY;
            };
            for (auto end = bytes.begin(); end != bytes.end();) {
                auto begin = std::find_if(end, bytes.end(), is_used);
                end = std::find_if_not(begin, bytes.end(), is_used);
                if (begin == end) break;
                size_t first = begin - bytes.begin(), last = end - bytes.begin();
                auto found = noted(memory, {first, last, kernel.stream, kernel.tick, writes, kernel.name}, kernel.clock);
                if (race.empty()) race = found;
            }
        };
        for (auto& [memory, bytes] : kernel.bytes) {
            note(*memory, bytes, false);
            note(*memory, bytes, true);
        }
        kernel.bytes.clear();
    }
    if (!race.empty()) raise(race);
}

// ---- NCCL: messages on a stream of their own, one after the other, which go over Gloo through main memory ----

using Tensors = std::vector<Tensor>;

Tensors in_main_memory(const Tensors& tensors) {
    Tensors moved;
    for (auto& tensor : tensors) moved.push_back(in_main_memory(tensor));
    return moved;
}

// A stream that waits for it may use what came. Until then it keeps the memory that is in use.
struct Message final : c10d::Work {
    int64_t stream = 0;
    Clock end;
    Tensors used;
    std::shared_future<void> sent;
    c10::intrusive_ptr<c10::ivalue::Future> future;

    ~Message() override {
        for (auto& tensor : used) Streams().recordDataPtrOnStream(tensor.storage().data_ptr(), stream_of(stream));
    }
    bool wait(std::chrono::milliseconds) override {  // the host waits too, because the stream's next operation is run at once
        sent.get();
        {
            std::lock_guard<std::mutex> guard(lock);
            ::wait(clocks[current], end);
        }
        used.clear();
        return true;
    }
    void synchronize() override { wait(kNoTimeout); }
    bool isCompleted() override { return sent.wait_for(std::chrono::seconds(0)) == std::future_status::ready; }
    bool isSuccess() const override { return true; }
    c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future; }
};

struct Part {  // of a group of sends and receives
    bool is_sent;
    Tensor tensor;
    int peer;
};

struct Nccl final : c10d::Backend {
    c10::intrusive_ptr<c10d::ProcessGroup> gloo;
    int64_t stream;
    std::mutex mutex;
    std::condition_variable changed;
    std::deque<std::function<void()>> tasks;
    bool is_over = false, is_grouping = false;
    std::vector<Part> grouped;
    std::thread thread;

    explicit Nccl(c10::intrusive_ptr<c10d::ProcessGroup> group)
        : Backend(group->getRank(), group->getSize()), gloo(std::move(group)), stream(Streams().getNewStream(GPU, 0).id()),
          thread([this] { work(); }) {}
    ~Nccl() override { shutdown(); }

    void shutdown() override {
        {
            std::lock_guard<std::mutex> guard(mutex);
            is_over = true;
        }
        changed.notify_all();
        if (thread.joinable()) thread.join();
    }
    void abort() override { shutdown(); }

    void work() {
        for (;;) {
            std::function<void()> task;
            {
                std::unique_lock<std::mutex> guard(mutex);
                changed.wait(guard, [this] { return is_over || !tasks.empty(); });
                if (tasks.empty()) return;
                task = std::move(tasks.front());
                tasks.pop_front();
            }
            task();
        }
    }

    // On the stream of messages, after what is on the caller's.
    c10::intrusive_ptr<c10d::Work> start(const char* name, const Tensors& reads, const Tensors& writes, std::function<void()> send) {
        auto message = c10::make_intrusive<Message>();
        c10::StreamGuard on_stream(stream_of(stream));
        {
            std::lock_guard<std::mutex> guard(lock);
            ::wait(clocks[stream], clocks[on_stream.original_stream().id()]);
        }
        Operation operation{name, {}};
        for (auto& tensor : reads) operation.use(tensor, false);
        for (auto& tensor : writes) operation.use(tensor, true);
        operation.start();
        message->stream = stream;
        message->end = clock_of(stream);
        message->used = reads;
        message->used.insert(message->used.end(), writes.begin(), writes.end());
        auto type = c10::ListType::create(c10::TensorType::get());
        auto future = message->future = c10::make_intrusive<c10::ivalue::Future>(type, std::vector<c10::Device>{GPU});
        auto sent = std::make_shared<std::promise<void>>();
        message->sent = sent->get_future().share();
        {
            std::lock_guard<std::mutex> guard(mutex);
            tasks.push_back([=, stream = stream, results = writes] {
                current = stream;
                try {
                    send();
                    sent->set_value();
                    future->markCompleted(c10::IValue(results));
                } catch (...) {
                    sent->set_exception(std::current_exception());
                    future->setErrorIfNeeded(std::current_exception());
                }
            });
        }
        changed.notify_all();
        return message;
    }

    const std::string getBackendName() const override { return "nccl"; }
    void setSequenceNumberForGroup() override {}
    uint64_t getSequenceNumberForGroup() override { return 0; }
    void setTimeout(std::chrono::milliseconds) override {}
    bool supportsCoalescing() const override { return true; }
    bool supportsSplitting() const override { return true; }

    c10::intrusive_ptr<c10d::Work> allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
        auto moved = in_main_memory(tensors);
        return start("all-reduce", tensors, tensors, [this, moved, options]() mutable {
            bool averages = options.reduceOp == c10d::ReduceOp::AVG;
            auto summed = options;
            if (averages) summed.reduceOp = c10d::ReduceOp::SUM;
            gloo->allreduce(moved, summed)->wait();
            if (averages) moved[0].div_(getSize());
        });
    }
    c10::intrusive_ptr<c10d::Work> broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
        auto moved = in_main_memory(tensors);
        bool is_root = getRank() == options.rootRank;
        return start("broadcast", is_root ? tensors : Tensors{}, is_root ? Tensors{} : tensors,
                     [this, moved, options]() mutable { gloo->broadcast(moved, options)->wait(); });
    }
    c10::intrusive_ptr<c10d::Work> _allgather_base(Tensor& output, Tensor& input, const c10d::AllgatherOptions& options) override {
        auto to = in_main_memory(output);
        return start("all-gather", {input}, {output}, [this, to, input, options]() mutable {
            auto from = in_main_memory(input).clone();  // it is often a part of the output
            gloo->_allgather_base(to, from, options)->wait();
        });
    }
    c10::intrusive_ptr<c10d::Work> allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
        std::vector<Tensors> to{in_main_memory(outputs[0])};
        auto from = in_main_memory(inputs);
        return start("all-gather", inputs, outputs[0], [this, to, from, options]() mutable { gloo->allgather(to, from, options)->wait(); });
    }
    c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(Tensor& output, Tensor& input, const c10d::ReduceScatterOptions& options) override {
        auto to = in_main_memory(output), from = in_main_memory(input);
        return start("reduce-scatter", {input}, {output}, [this, to, from, options]() mutable {
            Tensors whole{from.clone()};
            c10d::AllreduceOptions sums;
            gloo->allreduce(whole, sums)->wait();
            if (options.reduceOp == c10d::ReduceOp::AVG) whole[0].div_(getSize());
            to.copy_(whole[0].view(-1).narrow(0, getRank() * to.numel(), to.numel()).view_as(to));
        });
    }
    c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions&) override {
        Tensors one{at::ones({1}, at::TensorOptions().device(GPU))};
        auto work = allreduce(one, c10d::AllreduceOptions());
        work->wait(kNoTimeout);
        host_waits(clock_of(current));
        return work;
    }
    c10::intrusive_ptr<c10d::Work> send(Tensors& tensors, int target, int) override { return add({true, tensors[0], target}); }
    c10::intrusive_ptr<c10d::Work> recv(Tensors& tensors, int source, int) override { return add({false, tensors[0], source}); }
    c10::intrusive_ptr<c10d::Work> add(Part part) {
        grouped.push_back(std::move(part));
        if (!is_grouping) return endCoalescing();
        return c10::make_intrusive<Message>();  // of which nobody asks anything
    }
    void startCoalescing() override { is_grouping = true; }
    c10::intrusive_ptr<c10d::Work> endCoalescing() override {
        is_grouping = false;
        Tensors used[2];
        for (auto& part : grouped) used[part.is_sent].push_back(part.tensor);
        return start("sends and receives", used[true], used[false], [this, parts = std::exchange(grouped, {})] {
            std::vector<c10::intrusive_ptr<c10d::Work>> works;
            std::deque<Tensor> own[2];
            for (auto& part : parts) {
                Tensors moved{in_main_memory(part.tensor)};
                if (part.peer == getRank()) own[part.is_sent].push_back(moved[0]);
                else works.push_back(part.is_sent ? gloo->send(moved, part.peer, 0) : gloo->recv(moved, part.peer, 0));
            }
            for (size_t i = 0; i < own[true].size(); ++i) own[false].at(i).copy_(own[true][i]);
            for (auto& work : works) work->wait();
        });
    }
};

// What the modules in Python need.
TORCH_LIBRARY(simulated_gpu, m) {
    m.def("current_stream() -> int", [] { return current; });
    m.def("set_stream(int stream) -> ()", [](int64_t stream) { current = stream; });
    m.def("synchronize() -> ()", [] { Streams().synchronizeDevice(0); });
    m.def("seed(int seed) -> ()", [](int64_t seed) { generator().set_current_seed(seed); });
    m.def("in_main_memory(Tensor self) -> Tensor", [](const Tensor& self) { return in_main_memory(self); });
    m.def("add_nccl(__torch__.torch.classes.c10d.ProcessGroup group, __torch__.torch.classes.c10d.ProcessGroup gloo) -> ()",
          [](const c10::intrusive_ptr<c10d::ProcessGroup>& group, const c10::intrusive_ptr<c10d::ProcessGroup>& gloo) {
              group->setBackend(DeviceType::CUDA, c10d::ProcessGroup::BackendType::NCCL, c10::make_intrusive<Nccl>(gloo));
          });
    m.def("begin_kernel(str name) -> ()", begin_kernel);
    m.def("begin_program(int program) -> ()", begin_program);
    m.def("pass_barrier() -> ()", pass_barrier);
    m.def("use_in_kernel(Tensor lanes, Tensor addresses, Tensor stored, int num_lanes, int size, int action) -> ()", use_in_kernel);
    m.def("end_kernel() -> ()", end_kernel);
    m.def("resize_storage(Tensor self, int size) -> ()", resize_storage);
    m.def("without_order(Tensor self) -> ()", [](const Tensor& tensor) {
        std::lock_guard<std::mutex> guard(lock);
        unordered.insert(tensor.storage().data());
    });
    m.def("races() -> str[]", [] {
        std::lock_guard<std::mutex> guard(lock);
        return std::exchange(races, {});
    });
}

}  // namespace

namespace c10d {

// DistributedDataParallel times its backward passes, and asks for a clock of each device.
struct NoTimer final : Timer {
    explicit NoTimer(c10::Device) {}
    std::optional<int64_t> measureDifference(Event, Event) override { return 0; }
};
C10_REGISTER_TYPED_CLASS(TimerRegistry, c10::kCUDA, NoTimer)

}  // namespace c10d

// PyTorch's allocators can be set once it is loaded.
struct AtLoading {
    AtLoading() { c10::SetAllocator(DeviceType::CUDA, &allocator); }
} at_loading;
