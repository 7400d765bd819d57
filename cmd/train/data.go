package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"
	"github.com/vbauerster/mpb/v8"
	"github.com/vbauerster/mpb/v8/decor"

	"github.com/tandem-go/tandem/data"
	"github.com/tandem-go/tandem/launch"
)

func newData() *cobra.Command {
	cmd := &cobra.Command{Use: "data", Short: "Prepare texts", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() }}
	cmd.AddCommand(newDataPrepare())
	return cmd
}

func newDataPrepare() *cobra.Command {
	var dir, tokenizer string
	cmd := &cobra.Command{
		Use:   "prepare FILE",
		Short: "Encode a text into train.bin and val.bin, which --data maps into memory",
		Long: `Encodes a UTF-8 text of any size and writes, whole or not at all,
  train.bin  the first 90 % of the characters, two bytes a token (nanoGPT's format)
  val.bin    the rest
  meta.json  the tokenizer, so that --data needs no --tokenizer`,
		Example: `  train data prepare book.txt --tokenizer gpt2
  train --data book-gpt2`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if dir == "" {
				dir = strings.TrimSuffix(args[0], filepath.Ext(args[0])) + "-" + tokenizer
			}
			m, err := encode(cmd.Context(), args[0], dir, tokenizer, cmd.ErrOrStderr())
			if err != nil {
				return err
			}
			_, err = fmt.Fprintf(cmd.OutOrStdout(), "%s: %d tokens to train on and %d to validate on, %s with a vocabulary of %d\n",
				dir, m.TrainTokens, m.ValTokens, m.Tokenizer, m.Size)
			return err
		},
	}
	cmd.Flags().StringVar(&tokenizer, "tokenizer", data.GPT2Tokenizer, "gpt2 (byte-pair encoding) or char (one token a character)")
	cmd.Flags().StringVar(&dir, "out", "", "directory to write to (default: the text's name without its extension, and the tokenizer's)")
	return cmd
}

// encode prepares a text, under a progress bar where out is a terminal.
func encode(ctx context.Context, text, dir, tokenizer string, out io.Writer) (*data.Meta, error) {
	opts := &data.Options{Tokenizer: tokenizer}
	if f, ok := out.(*os.File); ok && isTerminal(f) {
		bars := mpb.New(mpb.WithOutput(out), mpb.WithWidth(48))
		defer bars.Wait()
		bar := bars.AddBar(0,
			mpb.PrependDecorators(decor.Name("encoding "), decor.CountersKibiByte("% .1f / % .1f")),
			mpb.AppendDecorators(decor.AverageETA(decor.ET_STYLE_GO)))
		defer bar.Abort(false) // a bar that isn't full, on an error
		opts.Progress = func(done, total int64) {
			bar.SetTotal(total, false)
			bar.SetCurrent(done)
			if done == total {
				bar.SetTotal(total, true)
			}
		}
	}
	return data.Prepare(ctx, text, dir, opts)
}

// encodes reports whether the text is to be encoded before ranks are started,
// once for all of them.
func (o *options) encodes() bool {
	if launch.Launched() || o.train.Tokenizer != data.GPT2Tokenizer || filepath.Ext(o.train.Data) == ".bin" {
		return false
	}
	st, err := os.Stat(o.train.Data)
	return err == nil && st.Mode().IsRegular()
}

// checkText reports what is wrong with the text before a rank is started. Ranks
// that others have started find out when they load it.
func (o *options) checkText(ctx context.Context) error {
	if launch.Launched() || o.encodes() {
		return nil
	}
	text, err := o.train.LoadText(ctx)
	if err != nil {
		return err
	}
	if startsRanks() {
		err = o.train.CheckOrigin(text)
	}
	return errors.Join(err, text.Close())
}

// encodeOnce makes the ranks' data of the text, in the output directory.
func (o *options) encodeOnce(ctx context.Context) error {
	if !o.encodes() {
		return nil
	}
	dir := filepath.Join(o.out, "tokens")
	if _, err := encode(ctx, o.train.Data, dir, o.train.Tokenizer, os.Stderr); err != nil {
		return err
	}
	o.train.Data = dir
	return o.checkText(ctx)
}
