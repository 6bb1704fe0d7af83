//! `springtide erase`: erases what one user left, by the control API, and checks receipts.

use std::path::PathBuf;

use anyhow::{Context, bail};
use artifact::sign::{ERASURE_KIND, Envelope, TrustedKeys};
use control::api::erasures::{Erased, Receipt};
use control::times::rfc3339;
use serde_json::json;

use super::App;
use super::control_client::ControlClient;
use super::output::{Confirm, Output, print};

#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    /// The user's key, as requests name it in `user`. `-` reads it from standard input, so that no list of processes has it.
    #[arg(long, required_unless_present = "verify", requires_all = ["reason", "receipt"])]
    user: Option<String>,
    /// The user's tenant [default: that of the API key].
    #[arg(long)]
    tenant: Option<String>,
    /// Why; kept in the audit. Do not name the user.
    #[arg(long)]
    reason: Option<String>,
    /// File for the signed receipt.
    #[arg(long, value_name = "FILE")]
    receipt: Option<PathBuf>,
    /// Check the signature of a receipt instead, with the public keys in `policy.keys`.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["user", "tenant", "reason", "receipt"])]
    verify: Option<PathBuf>,
    #[command(flatten)]
    confirm: Confirm,
    #[command(flatten)]
    output: Output,
}

impl Args {
    pub async fn run(self, app: &App) -> anyhow::Result<()> {
        if let Some(file) = self.verify {
            let bytes = std::fs::read(&file).with_context(|| format!("read {}", file.display()))?;
            let keys = TrustedKeys::load(&app.config.keys_dir()).context("load the public keys")?;
            let receipt = verified(&bytes, &keys).with_context(|| file.display().to_string())?;
            return self.output.print(&receipt, || text(&receipt));
        }
        let (Some(user), Some(file)) = (self.user, self.receipt) else {
            bail!("give --user and --receipt");
        };
        let user = match user.as_str() {
            "-" => std::io::read_to_string(std::io::stdin())
                .context("read the user from standard input")?
                .trim_end_matches('\n')
                .to_owned(),
            _ => user,
        };
        self.confirm
            .ask("What this user left will be erased. Nothing can bring it back. Erase it?")?;
        let body = json!({"user": user, "tenant": self.tenant, "reason": self.reason});
        let control = ControlClient::new(&app.config)?;
        let erased: Erased = control.post_and_wait("/v1/erasures", &body).await?;
        let bytes = serde_json::to_vec_pretty(&erased.envelope).context("write the receipt")?;
        let written = artifact::atomic::replace(&file, &[&bytes]);
        written.with_context(|| format!("write {}; repeat the command for another receipt", file.display()))?;
        self.output.print(&erased.receipt, || text(&erased.receipt))?;
        match self.output.json {
            true => Ok(()),
            false => print(&format!("receipt     {}", file.display())),
        }
    }
}

fn verified(bytes: &[u8], keys: &TrustedKeys) -> anyhow::Result<Receipt> {
    let envelope = Envelope::from_bytes(bytes).context("read the receipt")?;
    let payload = envelope.verify(ERASURE_KIND, keys).context("verify the receipt")?;
    serde_json::from_slice(&payload).context("read what was signed")
}

fn text(receipt: &Receipt) -> String {
    let mut text = format!("erased      {}\n", rfc3339(receipt.erased_at));
    text += &format!(
        "user        SHA-256 {} of tenant {}\n",
        receipt.user_digest, receipt.tenant
    );
    text += &format!(
        "unlinked    {} generations, {} feedback events, {} payloads\n",
        receipt.generations, receipt.feedback, receipt.payloads
    );
    if receipt.cohorts > 0 {
        text += &format!("cohorts     {} went back to the queue\n", receipt.cohorts);
    }
    for (policy, versions) in &receipt.trained {
        let tainted = receipt.tainted.get(policy).map_or(0, Vec::len);
        let listed: Vec<String> = versions.iter().map(i64::to_string).collect();
        text += &format!(
            "trained     {policy}: the steps that made {}; {tainted} versions contain them\n",
            listed.join(", ")
        );
    }
    text
}
