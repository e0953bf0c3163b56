// qemu-user plugin: how often each translated block ran, and its instructions.
// Prints one line per block at exit: count, address, then every instruction word in hexadecimal.
//
// qemu 4.2 to 8.2. Debian ships no header for plugins; this is what is used of the documented interface (QEMU
// TCG Plugins, version 1).
#include <inttypes.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef uint64_t qemu_plugin_id_t;
typedef struct qemu_info_t qemu_info_t;
struct qemu_plugin_tb;
struct qemu_plugin_insn;
enum qemu_plugin_op { QEMU_PLUGIN_INLINE_ADD_U64 };

void qemu_plugin_register_vcpu_tb_trans_cb(qemu_plugin_id_t id,
                                           void (*callback)(qemu_plugin_id_t, struct qemu_plugin_tb*));
void qemu_plugin_register_vcpu_tb_exec_inline(struct qemu_plugin_tb* tb, enum qemu_plugin_op op,
                                              void* counter, uint64_t summand);
void qemu_plugin_register_atexit_cb(qemu_plugin_id_t id, void (*callback)(qemu_plugin_id_t, void*),
                                    void* user_data);
size_t qemu_plugin_tb_n_insns(const struct qemu_plugin_tb* tb);
uint64_t qemu_plugin_tb_vaddr(const struct qemu_plugin_tb* tb);
struct qemu_plugin_insn* qemu_plugin_tb_get_insn(const struct qemu_plugin_tb* tb, size_t index);
const void* qemu_plugin_insn_data(const struct qemu_plugin_insn* insn);
void qemu_plugin_outs(const char* text);

__attribute__((visibility("default"))) int qemu_plugin_version = 1;

struct block {
  uint64_t count, address;
  size_t n_insns;
  struct block* next;
  uint32_t insns[];
};
static struct block* blocks;

static void on_translation(qemu_plugin_id_t id, struct qemu_plugin_tb* tb) {
  (void)id;
  const size_t n = qemu_plugin_tb_n_insns(tb);
  struct block* block = calloc(1, sizeof(*block) + n * sizeof(uint32_t));
  if (!block) abort();
  block->address = qemu_plugin_tb_vaddr(tb);
  block->n_insns = n;
  for (size_t i = 0; i < n; ++i) {
    memcpy(&block->insns[i], qemu_plugin_insn_data(qemu_plugin_tb_get_insn(tb, i)), sizeof(uint32_t));
  }
  block->next = blocks;
  blocks = block;
  qemu_plugin_register_vcpu_tb_exec_inline(tb, QEMU_PLUGIN_INLINE_ADD_U64, &block->count, 1);
}

static void on_exit_of_program(qemu_plugin_id_t id, void* user_data) {
  (void)id, (void)user_data;
  char text[32];
  for (const struct block* block = blocks; block; block = block->next) {
    if (block->count == 0) continue;
    snprintf(text, sizeof(text), "block %" PRIu64 " %" PRIx64, block->count, block->address);
    qemu_plugin_outs(text);
    for (size_t i = 0; i < block->n_insns; ++i) {
      snprintf(text, sizeof(text), " %08" PRIx32, block->insns[i]);
      qemu_plugin_outs(text);
    }
    qemu_plugin_outs("\n");
  }
}

__attribute__((visibility("default"))) int qemu_plugin_install(qemu_plugin_id_t id, const qemu_info_t* info,
                                                               int argc, char** argv) {
  (void)info, (void)argc, (void)argv;
  qemu_plugin_register_vcpu_tb_trans_cb(id, on_translation);
  qemu_plugin_register_atexit_cb(id, on_exit_of_program, NULL);
  return 0;
}
