#include "fiber.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <new>

#include "simulator/machine.hpp"

// Only what the calling convention makes a function preserve has to be kept: to the compiler, a switch is a call.
#if defined(__x86_64__)
asm(R"(
.text
.type flashgen_switch_stack, @function
flashgen_switch_stack:
    .cfi_startproc
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
    .cfi_endproc
.size flashgen_switch_stack, . - flashgen_switch_stack
)");
constexpr int kSavedWords = 6;
constexpr int kEntryWord = 6;  // popped by ret
#elif defined(__aarch64__)
asm(R"(
.text
.type flashgen_switch_stack, %function
flashgen_switch_stack:
    sub sp, sp, #160
    stp x19, x20, [sp, #0]
    stp x21, x22, [sp, #16]
    stp x23, x24, [sp, #32]
    stp x25, x26, [sp, #48]
    stp x27, x28, [sp, #64]
    stp x29, x30, [sp, #80]
    stp d8, d9, [sp, #96]
    stp d10, d11, [sp, #112]
    stp d12, d13, [sp, #128]
    stp d14, d15, [sp, #144]
    mov x9, sp
    str x9, [x0]
    mov sp, x1
    ldp x19, x20, [sp, #0]
    ldp x21, x22, [sp, #16]
    ldp x23, x24, [sp, #32]
    ldp x25, x26, [sp, #48]
    ldp x27, x28, [sp, #64]
    ldp x29, x30, [sp, #80]
    ldp d8, d9, [sp, #96]
    ldp d10, d11, [sp, #112]
    ldp d12, d13, [sp, #128]
    ldp d14, d15, [sp, #144]
    add sp, sp, #160
    ret
.size flashgen_switch_stack, . - flashgen_switch_stack
)");
constexpr int kSavedWords = 20;
constexpr int kEntryWord = 11;  // x30
#endif

#if defined(__x86_64__) || defined(__aarch64__)
extern "C" void flashgen_switch_stack(void** save, void* load);
#endif

namespace flashgen::simulator {

void switch_context(Context& from, Context& to) {
#if defined(__x86_64__) || defined(__aarch64__)
    flashgen_switch_stack(&from.stack_pointer, to.stack_pointer);
#else
    swapcontext(&from.registers, &to.registers);
#endif
}

Stacks::Stacks(int count) : mapping_bytes_((count + 1) * kStackBytes) {
    int flags = MAP_PRIVATE | MAP_ANONYMOUS;
#if defined(MAP_NORESERVE)
    flags |= MAP_NORESERVE;
#endif
    void* mapping = mmap(nullptr, mapping_bytes_, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (mapping == MAP_FAILED) throw std::bad_alloc();
    mapping_ = static_cast<unsigned char*>(mapping);
    const uintptr_t address = reinterpret_cast<uintptr_t>(mapping);
    first_ = mapping_ + (kStackBytes - address % kStackBytes) % kStackBytes;
    const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    for (int i = 0; i < count; ++i) {
        if (mprotect(first_ + i * kStackBytes, page, PROT_NONE) != 0) {
            munmap(mapping_, mapping_bytes_);
            throw std::bad_alloc();
        }
    }
}

Stacks::~Stacks() { munmap(mapping_, mapping_bytes_); }

void Stacks::prepare(int index, Context& context, void (*entry)(), void* owner) {
    unsigned char* base = first_ + index * kStackBytes;
    unsigned char* top = base + kStackBytes - 64;
    std::memset(top, 0, 64);
    std::memcpy(base + kStackBytes - sizeof(void*), &owner, sizeof(void*));
#if defined(__x86_64__) || defined(__aarch64__)
    // The words that a first switch restores; zeros end a debugger's walk up the stack.
    constexpr int kWords = kSavedWords + (kEntryWord >= kSavedWords ? 2 : 0);
    auto* words = reinterpret_cast<uintptr_t*>(top) - kWords;
    std::memset(words, 0, kWords * sizeof(uintptr_t));
    words[kEntryWord] = reinterpret_cast<uintptr_t>(entry);
    context.stack_pointer = words;
#else
    getcontext(&context.registers);
    const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    context.registers.uc_stack.ss_sp = base + page;
    context.registers.uc_stack.ss_size = static_cast<size_t>(top - base) - page;
    context.registers.uc_link = nullptr;
    makecontext(&context.registers, entry, 0);
#endif
}

}  // namespace flashgen::simulator
